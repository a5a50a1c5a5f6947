"""SGLang's 3FS store."""
