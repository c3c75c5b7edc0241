"""Rules and a mesh give the strategies of every op, with their prices."""
