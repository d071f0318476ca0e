-- Result: rows of the versions that may be loaded, newest first.
return finish(loadable())
