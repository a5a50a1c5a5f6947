"""SGLang's `dynamic` storage plug-in: servers read and write these stores themselves."""
