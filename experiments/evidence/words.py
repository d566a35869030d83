# ruff: noqa: SIM905 - plain words read better than quoted ones
"""Words that questions are made of. Their order decides which questions are asked."""

PEOPLE = """
Ada Alice Amy Anna Bella Carla Clara Daisy Dora Edith Ella Emma Eva Fiona Flora Freda Grace Greta Hanna Hazel
Helen Ida Iris Ivy Jane Julia Kate Lena Lily Lucy Mary Maya Mia Nina Nora Olga Olive Paula Rosa Rose Ruth Sara
Stella Tessa Una Vera Wanda Wilma Yara Zoe Adam Alan Albert Andy Arthur Ben Boris Carl Charlie Daniel David
Eric Ernest Felix Frank Fred George Gus Harry Henry Hugo Ian Igor Jack James Jim John Karl Leo Liam Luke Mark
Martin Max Milo Ned Noah Oscar Otto Owen Paul Peter Ralph Robert Sam Simon Theo Tom Victor Walter
""".split()

PLACES = """
kitchen garden barn forest library school market station harbour park attic cellar hall bedroom workshop
bakery museum tower hill beach bridge farm meadow mill castle cave office theatre village valley island roof
bathroom garage shop
""".split()

COLOURS = """
red blue green yellow white black brown grey pink purple orange silver golden
""".split()

THINGS = """
ball book key lamp cup spoon hat coat rope kite drum flute map coin ring letter candle clock hammer brush
mirror pillow blanket umbrella bottle knife plate bell doll puzzle camera compass ladder lantern needle
notebook pencil pen purse scarf shovel sponge stamp towel whistle violin radio ticket magnet marble mask medal
feather flag axe apron button crown glove jar kettle pot
""".split()

VERBS = "load read write scale merge split count check clean sort trim pack send".split()
