"""The migrations, one file each. A migration that was released is never altered."""
