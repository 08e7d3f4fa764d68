"""Run the application: sockets, connections and worker processes."""
