"""What the server does, without HTTP: typed requests in, typed answers out. One process can use it without any server."""
