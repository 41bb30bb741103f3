"""One operation for every weight move: layout -> plan -> move. Knows names, shapes and bytes in memory, no files."""
