"""The command line: commands, options, output, exit codes, man pages."""
