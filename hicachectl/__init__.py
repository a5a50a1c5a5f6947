"""Operations tool for SGLang's HiCache L3 store: what an operator does."""

__version__ = "0.1.0"
