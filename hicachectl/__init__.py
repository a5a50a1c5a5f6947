"""Operations tool for SGLang's HiCache L3 store."""

__version__ = "0.1.0"
