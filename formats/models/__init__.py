"""Models and server flags, and the profiles that they make."""
