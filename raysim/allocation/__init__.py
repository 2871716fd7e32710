"""How many synthetic images each client gets of each class: policies, the budget of FedEAS, the imbalance score.

Imports core and config; everything above may import it. It needs numpy, neither torch nor Ray.
"""
