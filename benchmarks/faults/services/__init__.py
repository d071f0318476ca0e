"""The four services, each behind its fault proxy: the package that the supervisor of a chaos run starts them from."""
