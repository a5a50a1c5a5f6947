"""Key grammars."""
