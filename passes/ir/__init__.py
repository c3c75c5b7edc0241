"""What all stages share: the joint graph, edits of graphs, facts about ops, private torch APIs."""
