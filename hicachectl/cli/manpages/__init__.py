"""The man pages, which `python -m hicachectl.cli.manpages.pages DIRECTORY` builds."""
