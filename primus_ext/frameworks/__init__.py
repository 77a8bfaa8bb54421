"""What primus_ext knows of each training framework: entry points and how to read a plan."""
