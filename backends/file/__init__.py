"""SGLang's file store."""
