"""SGLang's NIXL store on local files."""
