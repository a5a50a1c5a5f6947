"""How likely requests use a block again: a model fitted to the requests themselves."""
