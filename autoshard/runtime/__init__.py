"""What a rank does at run time: parameters, process groups, agreement, the compiled step."""
