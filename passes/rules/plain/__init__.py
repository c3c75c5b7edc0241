"""Rules of ops whose dims correspond one to one."""
