"""Moving page groups from one store to another, as they are or as another deployment has them."""
