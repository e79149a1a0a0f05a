"""One file for each way in which a run could silently be another one than is accounted."""
