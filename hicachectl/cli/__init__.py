"""Command line: commands, options, output, exit codes and man pages."""
