"""A run folder as a page to look at, a picture, and a server that follows a running job. Reads files only."""
