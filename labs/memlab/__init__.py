"""What the labs, the book and the command line share. Import the module you need: this file imports nothing."""
