"""Pictures of a plan: fold repeated layers, group ops by module, place the groups, write them."""
