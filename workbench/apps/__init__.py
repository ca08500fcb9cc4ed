"""The products: the command line, the server, the course, the playground, a measurement and the demo."""
