"""What routers do on a text: one pass of counting, then statistics, figures and tables of what was counted."""
