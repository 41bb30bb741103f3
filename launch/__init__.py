"""Commands that start ranks and look after them. `launch.local` starts ranks on this machine from a plain process."""
