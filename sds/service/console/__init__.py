"""The console: what waits for a human, one case at a time, what is decided now, and who may stop it (DIR 4.7). Pages are made
here, on the server; a browser without scripts loses only that the live page renews itself.
"""
