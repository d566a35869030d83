# ruff: noqa: E501, SIM905 - plain words read better than quoted ones
"""The words of the dialogues: those of the small worlds, and more."""

from mlxkv.texts.worlds import words as worlds

NAMES = (
    worlds.PEOPLE
    + """Aisha Alex Ali Andrea Ann Anne Ava Barbara Bill Bob Brian Bruno Carlos Chloe Chris Claire Dan
Dave Diana Elena Ellen Emily Erik Farah Finn Gina Hans Hassan Holly Ivan Jake Jan Jill Jo Joe Jonas Joy Juan Julie Kai Ken Kim
Kevin Lara Laura Lea Lee Lisa Lola Lou Maria Marie Mateo Matt Meg Mike Molly Nadia Nick Nico Nick Olivia Omar Pam Pat Paulo Petra
Phil Priya Rachel Raj Rita Rob Ron Roy Sally Sandra Sanjay Sarah Sean Sofia Sue Susan Ted Tim Tina Tony Uma Vic Will Yuki Zara
Zach Eli Max Ollie Maggie Becky Hannah Sophie Jack Josh Ryan Amir Chen Mei Ling Ravi Anya Katya Lars Sven Ingrid Pedro Luis
Rosa Pablo Marco Luca Paolo Giulia Pierre Louis Camille""".split()
)

THINGS = (
    worlds.THINGS
    + """kite car bike bicycle phone laptop table chair bag box boat toy bowl jacket shirt dress sweater watch
guitar piano scooter ladder truck train plane robot teddy balloon hammer basket backpack wallet vase sofa desk tent sled
notebook skateboard helmet bracelet necklace ribbon cap mug teapot blanket carpet curtain fork tie belt sock shoe boot bucket
folder envelope parcel present gift cake candle puzzle game trumpet torch bus van tractor rocket pillow fan towel yo-yo doll
tablet charger cable remote magazine newspaper saw screwdriver wrench spade rake bench barrel crate jug cushion rug""".split()
)

PLURAL_THINGS = """keys glasses books shoes socks gloves scissors tickets pencils coins letters biscuits cookies apples stamps
photos maps cards papers boots plates cups towels candles batteries toys marbles slippers headphones sunglasses""".split()

COLOURS = (
    """red blue green yellow white black brown grey pink purple orange silver golden""".split()
)
MORE_COLOURS = "turquoise beige violet crimson dark-blue gold navy".split()

SPOTS = (
    worlds.SPOTS
    | dict.fromkeys(
        """kitchen garden garage attic cellar bathroom bedroom fridge oven car box pocket jar hall library office shed cabinet wardrobe
bin backpack case closet basement safe hallway boot glovebox bowl toolbox""".split(),
        "in",
    )
    | {
        "wall": "on",
        "roof": "on",
        "floor": "on",
        "table": "on",
        "counter": "on",
        "windowsill": "on",
        "stairs": "on",
        "station": "at",
        "school": "at",
        "rug": "under",
        "tree": "under",
        "stove": "on",
        "fence": "behind",
        "tv": "behind",
        "lamp": "next to",
        "window": "next to",
        "oven": "in",
        "doormat": "under",
        "pillow": "under",
        "balcony": "on",
    }
)

TOWNS = (
    worlds.TOWNS
    + """Paris London Berlin Rome Madrid Boston Chicago Toronto Sydney Tokyo Oslo Athens Delhi Mumbai Cairo Dallas
Denver Seattle Leeds Glasgow Bristol Bath Lima Quito Nairobi Lagos Osaka Seoul Hanoi Austin Miami Vancouver Montreal Melbourne
Perth Helsinki Stockholm Copenhagen Vilnius Brussels Amsterdam Bonn Cologne Nice Marseille Barcelona Valencia""".split()
)
COUNTRIES = tuple(worlds.CAPITALS)

JOBS = (
    worlds.JOBS
    + """lawyer engineer scientist student chef waiter mechanic barber vet postman firefighter journalist
librarian musician programmer electrician butcher florist architect photographer dancer coach manager pharmacist""".split()
)

FOODS = (
    worlds.DISHES
    + """apples pears plums bananas pizza cake cheese strawberries ice-cream carrots curry sushi tea coffee milk
lemonade juice salmon chicken beans potatoes tomatoes cookies grapes oranges melons cherries waffles""".split()
)

HOBBIES = (
    worlds.HOBBIES
    + "hiking drawing knitting surfing gaming yoga photography hockey baseball basketball golf".split()
)

PETS = worlds.PETS + "puppy kitten horse fish bird snake frog mouse pig sheep cow fox".split()
PET_NAMES = """Rex Bella Luna Max Fluffy Spot Rocky Coco Milo Daisy Buddy Oreo Simba Nala Ginger Shadow Pepper Lucky Toby Ruby
Biscuit Cookie Smokey Tiger Felix Bruno Whiskers Snowy Pip Bobo Zazu Mango Peanut Pickles Socks""".split()

DAYS, MONTHS = worlds.DAYS, worlds.MONTHS
COUNTABLE = tuple(worlds.COUNTABLES.values())
EVENTS = """party meeting concert exam match wedding game lesson picnic show trip test dinner lunch appointment
interview festival race class call film""".split()
VEHICLES = "train bus plane ferry boat shop bank library museum film show class lesson meeting market office".split()
KEYED = "code password PIN number".split()
LOCKED = """door safe gate garage phone laptop locker bike box alarm wifi computer card room vault cabinet shed
account printer office""".split()
RELATIVES = "sister brother mother father aunt uncle cousin friend boss teacher neighbour daughter son wife husband".split()
KINDS = worlds.KINDS
LABELS = worlds.LABELS
NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty""".split()
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def a(word: str) -> str:
    """Return the word with its article."""
    return f"{'an' if word[0].lower() in 'aeio' or word.startswith('um') else 'a'} {word}"
