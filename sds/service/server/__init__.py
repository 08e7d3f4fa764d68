"""What runs the application: sockets, connections, processes."""
