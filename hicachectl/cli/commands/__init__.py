"""Commands, one module each: parse the options, call the operation, print its result."""
