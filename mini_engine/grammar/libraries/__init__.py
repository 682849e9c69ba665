"""Grammar backends that adapt a library."""
