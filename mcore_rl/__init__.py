"""The program: configuration, data, rewards, algorithms, roles, the loop, the command line."""
