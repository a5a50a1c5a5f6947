"""The man pages, which `python -m hicachectl.cli.manpages DIRECTORY` builds."""
