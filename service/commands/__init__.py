"""What the client commands do: talk to a server, write to the given output.

Knows the client and what a terminal shows; knows no flags, no exit codes and nothing of the server's inside.
"""
