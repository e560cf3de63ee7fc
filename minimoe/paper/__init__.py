"""The paper "Elbow-based MoE Routing", done again on any checkpoint: its tables, its figures, its faults."""
