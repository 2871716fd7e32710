"""`raysim plan`: what each allocation policy would cost, as a table and as JSON.

Part of `commands`: imports what `commands` may import.
"""
