"""How the built-in model was built, trained and measured; not part of the wheel."""
