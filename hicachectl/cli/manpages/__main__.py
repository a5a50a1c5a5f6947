"""Build the man pages: `python -m hicachectl.cli.manpages DIRECTORY`."""

import sys
from pathlib import Path

from hicachectl.cli.manpages.pages import build

if __name__ == "__main__":
    build(Path(sys.argv[1]))
