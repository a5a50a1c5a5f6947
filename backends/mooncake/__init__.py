"""SGLang's Mooncake store."""
