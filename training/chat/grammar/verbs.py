# ruff: noqa: E501 - one list of verbs reads better than wrapped ones
"""Verbs: base, past, participle, -ing; what they are done to; and their forms."""

TRANSITIVE = """see saw seen seeing thing|find found found finding thing|buy bought bought buying thing|sell sold sold selling thing
paint painted painted painting thing|lose lost lost losing thing|break broke broken breaking thing|clean cleaned cleaned cleaning thing
fix fixed fixed fixing thing|hide hid hidden hiding thing|open opened opened opening thing
take took taken taking thing|bring brought brought bringing thing|borrow borrowed borrowed borrowing thing|make made made making thing
draw drew drawn drawing thing|wash washed washed washing thing|drop dropped dropped dropping thing|throw threw thrown throwing thing
steal stole stolen stealing thing|build built built building thing|close closed closed closing thing|repair repaired repaired repairing thing
choose chose chosen choosing thing|hold held held holding thing|wear wore worn wearing thing|use used used using thing|wrap wrapped wrapped wrapping thing
lift lifted lifted lifting thing|pack packed packed packing thing|keep kept kept keeping thing|rent rented rented renting thing|lend lent lent lending thing
send sent sent sending thing|order ordered ordered ordering thing|collect collected collected collecting thing|move moved moved moving thing
eat ate eaten eating food|taste tasted tasted tasting food|bake baked baked baking food|prepare prepared prepared preparing food
serve served served serving food|smell smelled smelled smelling food|share shared shared sharing food|bring brought brought bringing food
mix mixed mixed mixing food|finish finished finished finishing food|spill spilled spilled spilling food|buy bought bought buying food
meet met met meeting person|call called called calling person|visit visited visited visiting person|help helped helped helping person
see saw seen seeing person|marry married married marrying person|thank thanked thanked thanking person|phone phoned phoned phoning person
follow followed followed following person|hug hugged hugged hugging person|invite invited invited inviting person|teach taught taught teaching person
greet greeted greeted greeting person|kiss kissed kissed kissing person|draw drew drawn drawing person|beat beat beaten beating person
feed fed fed feeding animal|catch caught caught catching animal|chase chased chased chasing animal|wash washed washed washing animal
find found found finding animal|hear heard heard hearing animal|hold held held holding animal
brush brushed brushed brushing animal|pet petted petted petting animal|love loved loved loving animal|draw drew drawn drawing animal
read read read reading text|write wrote written writing text|sign signed signed signing text|study studied studied studying text
play played played playing game|learn learned learned learning game|enjoy enjoyed enjoyed enjoying game|watch watched watched watching game
win won won winning game|hate hated hated hating game"""
TEXTS = [
    "letter",
    "book",
    "poem",
    "story",
    "note",
    "report",
    "newspaper",
    "list",
    "diary",
    "song",
    "message",
    "essay",
    "card",
    "email",
]
GAMES = [
    "chess",
    "football",
    "tennis",
    "poker",
    "golf",
    "cards",
    "hockey",
    "guitar",
    "piano",
    "dominoes",
]
# base, past, -ing, preposition, what follows
PLACED = """travel travelled travelling to town|fly flew flying to town|drive drove driving to town|move moved moving to town|walk walked walking to town
come came coming from town|arrive arrived arriving from town|run ran running from town|study studied studying in town|stay stayed staying in town
teach taught teaching in town|grow grew growing in town|wait waited waiting for person|look looked looking for thing|talk talked talking to person
listen listened listening to person|play played playing with animal|sit sat sitting next to person|stand stood standing next to person
dance danced dancing with person|dream dreamed dreaming of thing|think thought thinking of person|pay paid paying for thing
ask asked asking for thing|laugh laughed laughing at person|sing sang singing for person|write wrote writing to person|care cared caring for animal
live lived living with person|fight fought fighting with person|point pointed pointing at thing|sleep slept sleeping next to animal"""
OTHER_PAST = """have had|live lived|like liked|get got|go went|do did|give gave|say said|put put|leave left|want wanted|need needed|know knew|cost cost
own owned|start started|begin began|end ended|happen happened|mean meant|call called|tell told|feel felt|weigh weighed|last lasted|sleep slept|stand stood"""


def rows(text: str) -> list[list[str]]:
    return [row.split() for line in text.splitlines() for row in line.split("|")]


VERBS = rows(TRANSITIVE)
MOVES = [(*row[:3], " ".join(row[3:-1]), row[-1]) for row in rows(PLACED)]
PAST = {row[0]: row[1] for row in [*VERBS, *MOVES, *rows(OTHER_PAST)]}


def third(base: str) -> str:
    """Return the form after he or she: carries, watches, has."""
    if base in ("have", "be"):
        return {"have": "has", "be": "is"}[base]
    if base.endswith("y") and base[-2] not in "aeiou":
        return base[:-1] + "ies"
    return base + ("es" if base.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")
