# ruff: noqa: C408, SIM905 - plain words read better than quoted ones
"""The vocabulary of the small worlds: people, places, things, and a little common knowledge."""

GIRLS = """Ada Alice Amy Anna Bella Carla Clara Daisy Dora Edith Ella Emma Eva Fiona Flora Freda
Grace Greta Hanna Hazel Helen Ida Iris Ivy Jane Julia Kate Lena Lily Lucy Mary Maya Mia Nina Nora
Olga Olive Paula Rosa Rose Ruth Sara Stella Tessa Una Vera Wanda Wilma Yara Zoe""".split()

BOYS = """Adam Alan Albert Andy Arthur Ben Boris Carl Charlie Daniel David Eric Ernest Felix Frank
Fred George Gus Harry Henry Hugo Ian Igor Jack James Jim John Karl Leo Liam Luke Mark Martin Max
Milo Ned Noah Oscar Otto Owen Paul Peter Ralph Robert Sam Simon Theo Tom Victor Walter""".split()

PEOPLE = GIRLS + BOYS
_GIRLS = frozenset(GIRLS)


def pronouns(name: str) -> tuple[str, str, str]:
    """Return the subject, object and possessive pronoun of a person in PEOPLE."""
    return ("she", "her", "her") if name in _GIRLS else ("he", "him", "his")


# A place and the preposition that goes with it.
PLACES = dict(
    kitchen="in", garden="in", barn="in", forest="in", library="in", school="at", market="at",
    station="at", harbour="at", park="in", attic="in", cellar="in", hall="in", bedroom="in",
    workshop="in", bakery="at", museum="at", tower="in", hill="on", beach="on", bridge="on",
    farm="on", meadow="in", mill="at", castle="in", cave="in", office="in", theatre="at",
    village="in", valley="in", island="on", roof="on", bathroom="in", garage="in", shop="in",
)  # fmt: skip


def at(place: str) -> str:
    """Return a place with its preposition: 'in the kitchen'."""
    return f"{PLACES[place]} the {place}"


# Where a thing may be put, with its preposition.
SPOTS = dict(
    box="in", basket="in", drawer="in", cupboard="in", bag="in", bucket="in", chest="in",
    suitcase="in", table="on", shelf="on", chair="on", bench="on", desk="on", bed="under",
    sofa="under", carpet="under", door="behind", curtain="behind", piano="behind", tray="on",
)  # fmt: skip


def on(spot: str) -> str:
    """Return a spot with its preposition: 'in the box'."""
    return f"{SPOTS[spot]} the {spot}"


THINGS = """ball book key lamp cup spoon hat coat rope kite drum flute map coin ring letter candle
clock hammer brush mirror pillow blanket umbrella bottle knife plate bell doll puzzle camera
compass ladder lantern needle notebook pencil pen purse scarf shovel sponge stamp towel whistle
violin radio ticket magnet marble mask medal feather flag axe apron button crown glove jar kettle
pot""".split()

COLOURS = """red blue green yellow white black brown grey pink purple orange silver
golden""".split()

MOODS = """happy sad tired proud angry calm afraid hungry thirsty curious glad lonely nervous
quiet surprised excited bored cheerful""".split()

WEATHER = """sunny rainy windy cold warm foggy snowy cloudy stormy quiet bright hot""".split()

TIMES = """morning afternoon evening night day""".split()

# singular, plural
FOOD = dict(
    apple="apples", pear="pears", plum="plums", cherry="cherries", peach="peaches", lemon="lemons",
    carrot="carrots", potato="potatoes", tomato="tomatoes", onion="onions", egg="eggs",
    nut="nuts", berry="berries", cake="cakes", pie="pies", biscuit="biscuits", grape="grapes",
    orange="oranges", bean="beans", mushroom="mushrooms", sandwich="sandwiches", bun="buns",
)  # fmt: skip

COUNTABLES = FOOD | dict(
    stone="stones", shell="shells", stick="sticks", leaf="leaves", flower="flowers", coin="coins",
    stamp="stamps", marble="marbles", book="books", pencil="pencils", button="buttons",
    candle="candles", box="boxes", brush="brushes", knife="knives", toy="toys", card="cards",
)  # fmt: skip

# animal: (plural, sound as a verb, where it lives)
ANIMALS = dict(
    cat=("cats", "meows", "in a house"), dog=("dogs", "barks", "in a house"),
    cow=("cows", "moos", "on a farm"), sheep=("sheep", "bleats", "on a farm"),
    horse=("horses", "neighs", "in a stable"), pig=("pigs", "grunts", "on a farm"),
    duck=("ducks", "quacks", "on a pond"), hen=("hens", "clucks", "on a farm"),
    frog=("frogs", "croaks", "in a pond"), bee=("bees", "buzzes", "in a hive"),
    lion=("lions", "roars", "in Africa"), wolf=("wolves", "howls", "in the forest"),
    owl=("owls", "hoots", "in the forest"), mouse=("mice", "squeaks", "in a hole"),
    snake=("snakes", "hisses", "in the grass"), bear=("bears", "growls", "in the forest"),
    goose=("geese", "honks", "on a farm"), crow=("crows", "caws", "in a tree"),
    donkey=("donkeys", "brays", "on a farm"), fox=("foxes", "barks", "in the forest"),
)  # fmt: skip

PETS = """cat dog rabbit parrot hamster turtle goldfish pony canary lizard mouse hen goat
duck""".split()

JOBS = """baker teacher doctor nurse farmer painter singer driver gardener cook sailor pilot
tailor miller carpenter writer actor dentist plumber builder judge fisher hunter potter""".split()

DISHES = """soup bread rice honey cheese pasta salad porridge fish toast jam butter chocolate
pancakes dumplings pudding noodles yoghurt""".split()

HOBBIES = """painting swimming reading singing fishing cooking dancing running sewing chess
football tennis sailing cycling skating gardening climbing juggling""".split()

MONTHS = """January February March April May June July August September October November
December""".split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

TOWNS = """Ashford Bergen Brighton Calais Cardiff Derby Dublin Exeter Florence Geneva Hamburg
Harlow Kendal Leeds Lisbon Lyon Malmo Milan Munich Naples Norwich Oxford Porto Prague Riga Salem
Seville Turin Utrecht Venice Verona Vienna Warsaw Whitby York Zurich""".split()

# Plain nouns used as passwords and labels.
LABELS = """anchor arrow autumn badger barrel beacon breeze bronze canyon castle cedar circle
cloud clover comet copper coral cotton crystal dragon eagle ember falcon fern flame forest fossil
galaxy garnet ginger glacier granite harbor hazel hornet indigo island ivory jasmine jungle kernel
lagoon lantern laurel lemon maple marble meadow melon meteor mirror monkey nectar ocean olive onyx
orchid otter oyster panther pebble pepper pigeon planet prairie prism puffin quartz rabbit raven
ribbon river rocket saddle salmon satin shadow signal silver spider spruce storm summer sunset
temple thistle thunder tiger timber tulip tunnel turtle valley velvet violet walnut willow winter
wizard zebra""".split()

CAPITALS = dict(
    France="Paris", Italy="Rome", Spain="Madrid", Germany="Berlin", England="London",
    Ireland="Dublin", Portugal="Lisbon", Greece="Athens", Norway="Oslo", Sweden="Stockholm",
    Finland="Helsinki", Denmark="Copenhagen", Poland="Warsaw", Austria="Vienna", Hungary="Budapest",
    Russia="Moscow", Japan="Tokyo", China="Beijing", India="Delhi", Egypt="Cairo", Kenya="Nairobi",
    Canada="Ottawa", Mexico="Mexico City", Brazil="Brasilia", Peru="Lima", Chile="Santiago",
    Cuba="Havana", Turkey="Ankara", Iceland="Reykjavik", Scotland="Edinburgh", Wales="Cardiff",
    Switzerland="Bern", Belgium="Brussels", Australia="Canberra",
)  # fmt: skip

OPPOSITES = dict(
    big="small", hot="cold", fast="slow", happy="sad", old="new", tall="short", early="late",
    light="dark", full="empty", open="closed", hard="soft", clean="dirty", strong="weak",
    loud="quiet", wet="dry", rich="poor", high="low", heavy="light", good="bad", long="short",
    near="far", thick="thin", easy="difficult", young="old", left="right", up="down", day="night",
)  # fmt: skip

COLOUR_OF = dict(
    grass="green", snow="white", coal="black", blood="red", milk="white", chocolate="brown",
    gold="yellow", ink="blue", mud="brown", ash="grey", salt="white", spinach="green",
)  # fmt: skip

COLOUR_OF_MANY = dict(
    lemons="yellow", carrots="orange", tomatoes="red", plums="purple", bananas="yellow",
    elephants="grey", flamingos="pink", crows="black", strawberries="red", swans="white",
)  # fmt: skip

# present third person -> past
PAST = dict(
    goes="went", takes="took", gives="gave", finds="found", sees="saw", eats="ate", runs="ran",
    sings="sang", writes="wrote", reads="read", makes="made", buys="bought", brings="brought",
    thinks="thought", sleeps="slept", drinks="drank", swims="swam", breaks="broke", draws="drew",
    walks="walked", opens="opened", plays="played", cooks="cooked", paints="painted",
)  # fmt: skip

MEANINGS = dict(
    baker="A baker makes bread and cakes.", teacher="A teacher helps people to learn.",
    doctor="A doctor helps people who are ill.", farmer="A farmer grows food and keeps animals.",
    tailor="A tailor makes clothes.", pilot="A pilot flies a plane.",
    sailor="A sailor works on a ship.", gardener="A gardener takes care of plants.",
    carpenter="A carpenter makes things of wood.", potter="A potter makes pots of clay.",
    library="A library is a place with many books.", bakery="A bakery is a shop that sells bread.",
    museum="A museum is a place where old and rare things are shown.",
    island="An island is land with water all around it.", harbour="A harbour is a place for ships.",
    key="A key opens a lock.", compass="A compass shows where north is.",
    clock="A clock shows the time.", umbrella="An umbrella keeps you dry in the rain.",
    lamp="A lamp gives light.", map="A map shows where places are.",
    kite="A kite flies in the wind.",
)  # fmt: skip
