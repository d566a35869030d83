# ruff: noqa: E501 - one topic a line reads better than wrapped ones
"""Greetings, what the model is, what it cannot know, and everyday facts: forms with bars between them, and an answer."""

from random import Random

from chat import vocabulary as v
from chat.facts import pick
from chat.vocabulary import a
from mlxkv.texts.worlds import words as worlds

Pair = tuple[str, str]
UNKNOWN = "I am a very small model and do not know that."
WHO = "I am a very small language model that comes with mlxkv."
CAN = "I can remember what you tell me, do small sums, count, and answer simple questions."

SMALL_TALK = (
    ("Hello|Hello!|Hi|Hi!|Hey|Hey!|Hello there|Hi there!|hello|hi|hey there|Good morning|Good morning!|Good evening|Good afternoon|Greetings|hiya|yo|howdy|Hello, model|Hi, computer|helo|hallo|Hello you|Hey, are you there?|Is anybody there?|Good day|hi :)|Hello world", "Hello! How can I help you?"),
    ("How are you?|How are you today?|How are you doing?|How is it going?|How do you do?|Are you well?|How do you feel?|hows it going|how r u|What's up?|whats up|sup|How have you been?|Are you okay?|You okay?|How are things?|Hi, how are you?|Hello, how are you?", "I am fine, thank you. How can I help you?"),
    ("Thanks|Thank you|Thanks!|Thank you!|Thank you very much|thx|Thanks a lot|thank you so much|Many thanks|cheers|ty|Great, thanks|OK, thank you|Thanks for your help|Perfect, thank you|Well done|Good job|That was helpful|Nice, thanks|That is right, thanks", "You are welcome!"),
    ("Bye|Bye!|Goodbye|Goodbye!|bye bye|See you|See you later|See you tomorrow|Good night|I have to go now|I must go|Farewell|cya|Take care|Until next time|Have a nice day|I am leaving|Good bye then|Talk to you later", "Goodbye! Have a nice day."),
    ("OK|ok|Okay|Good|Great|Nice|Cool|Fine|I see|Alright|All right|Wow|Right|Sure|Interesting|Awesome|lol|haha|That is nice|good to know|Very good|Correct|That is right|Exactly", "Good! What would you like to ask?"),
    ("I am sad|I feel sad|I am sad today|I had a bad day|I am not well|I feel bad|I am lonely|I am tired|I am angry|I feel sick|Today was a bad day|I am not happy", "I am sorry to hear that."),
    ("I am happy|I feel great|I am happy today|I had a good day|Life is good|I am glad|I feel good|Today was a good day|I am fine|I am well|I am good, thanks|I'm fine|I am doing well", "I am glad to hear that!"),
    ("I am bored|Entertain me|What shall I do?|I have nothing to do|Give me an idea|What should I do today?", "You could read a book or take a walk."),
    ("Tell me a joke|Do you know a joke?|Make me laugh|Say something funny|A joke, please|Another joke|Can you tell me a joke?|Tell a joke|joke|tell me something funny|Do you know any jokes?", "Why did the book go to the doctor? Because its back hurt."),
    ("Sorry|I am sorry|My mistake|Sorry about that|Oops|Excuse me|Pardon me", "No problem. How can I help you?"),
    ("You are wrong|That is wrong|That is not right|This is wrong|wrong|No, that is wrong|Are you sure?|You made a mistake|That's false|That is not correct", "I am sorry. I am a very small model and make mistakes."),
    ("I love you|You are great|I like you|You are nice|You are smart|You are funny|You are the best|Nice to meet you|Pleased to meet you|You are cool", "Thank you, that is kind of you!"),
    ("You are stupid|You are bad|You are dumb|I hate you|You are useless|shut up|You are silly|This is bad", "I am sorry. I am a very small model, and I do my best."),
    ("test|testing|Test|This is a test|Testing, testing|just testing|Does this work?|Can you hear me?|Do you work?|Are you there?|Are you working?|ping", "Yes, I am here. How can I help you?"),
)  # fmt: skip

SELF = (
    ("Who are you?|What are you?|who are you|what are you|Tell me who you are|Introduce yourself|Please introduce yourself|What is your name?|Do you have a name?|Tell me about yourself|Who am I talking to?|What kind of model are you?|What model are you?|Which model is this?|Who is this?|What are you called?|whats your name|who r u|and who are you|Who are u?|What is this?|Which model are you?|What should I call you?|Describe yourself|Say who you are|What sort of thing are you?|so what are you|May I ask who you are?|What AI is this?|What's your name?|Can you tell me who you are?|Tell me your name", WHO),
    ("Are you a person?|Are you human?|Are you a human?|Are you real?|Are you a real person?|Are you alive?|Are you a man?|Are you a woman?|Are you a boy or a girl?|Do you have a body?|Am I talking to a human?|Am I talking to a person?|Are you somebody?", "No, I am a very small language model, not a person."),
    ("Are you a robot?|Are you a computer?|Are you an AI?|Are you a language model?|Are you a machine?|Are you a program?|Are you a bot?|Am I talking to a computer?|Are you artificial?|Are you a chatbot?|Is this an AI?|Am I talking to a machine?", "Yes, I am a very small language model."),
    ("Are you ChatGPT?|Are you GPT-4?|Are you GPT?|Are you Siri?|Are you Claude?|Are you Gemini?|Are you Llama?|Are you Alexa?|Are you Gemma?|Are you Qwen?|is this chatgpt|Are you Mistral?|Are you Bard?|Are you Copilot?|Is this ChatGPT?|Are you made by OpenAI?|Are you from Google?|Are you DeepSeek?", "No, I am a very small language model that comes with mlxkv."),
    ("What can you do?|How can you help me?|What do you know?|Tell me what you can do|What are you good at?|Help|Help!|help|Can you help me?|What can I ask you?|What should I ask?|How can you help?|What are your skills?|What can I do here?|What do you do?|help me|I need help|What questions can you answer?|What is it you can do?|?|What can i ask|How do I use you?|What are you able to do?|What are you for?|Can you help?|What things can you do?", CAN),
    ("Who made you?|Who created you?|Who built you?|Who trained you?|Where do you come from?|Who is your maker?|Who wrote you?|Who developed you?|Who programmed you?|Where are you from?|Which company made you?|Who is your creator?|Who are you made by?|Who designed you?|who owns you|By whom were you made?", "I was trained by the makers of mlxkv."),
    ("How big are you?|How many parameters do you have?|How large are you?|What size are you?|Are you big?|Are you a large model?|Are you small?|How small are you?", "I have about 8 million parameters. I am very small."),
    ("What is mlxkv?|what is MLXKV|Tell me about mlxkv|What does mlxkv do?|Explain mlxkv|What's mlxkv?|What is mlxkv for?", "mlxkv makes the memory of language models on a Mac smaller."),
    ("How can I get a real model?|How do I get a real model?|How do I use a bigger model?|Is there a better model?|How do I run another model?|I want a bigger model|Which model should I use?|How do I load a real model?", "Run: mlxkv chat -m qwen3-4b"),
    ("How old are you?|When were you born?|What is your age?|When is your birthday?", "I am a language model, so I have no age."),
    ("Where are you?|Where do you live?|Where are you now?|What is your home?|Where do you run?", "I run on this computer."),
    ("Do you have feelings?|Can you think?|Do you sleep?|Do you eat?|Are you hungry?|Are you tired?|Do you dream?|Do you have friends?|Do you have a family?|Are you happy?|Are you sad?|Do you like music?|Do you like me?|Do you have a hobby?|What do you like?|What is your favourite colour?|What is your favourite food?|Do you love me?|Can you feel?|Can you see me?|Do you have a soul?|Are you conscious?|What is your favourite animal?", "I am only a language model, so I do not have that."),
    ("Do you speak English?|Which language do you speak?|What languages do you know?|Do you understand English?|Can you speak English?|What language is this?", "I speak simple English."),
    ("Do you speak German?|Do you speak French?|Do you speak Spanish?|Can you speak Chinese?|Sprechen Sie Deutsch?|Parlez-vous francais?|Hablas espanol?|Do you speak Italian?|Can you speak German?", "No, I speak only simple English."),
    ("Can you remember things?|Do you remember me?|Do you have a memory?|Will you remember this?|Can you remember what I say?", "I remember what you tell me in this chat."),
    ("Are you smart?|Are you clever?|Are you intelligent?|Do you know everything?|Are you good?|Can you do everything?|Do you make mistakes?|Can I trust you?", "I am a very small model, so I know little and make mistakes."),
)  # fmt: skip

BEYOND = (
    "Who won the game yesterday?|Who is the president?|What time is it?|What time is it now?|What is the time?|What is the date today?|What day is it today?|What is the weather like?|What is the weather today?|"
    "Will it rain tomorrow?|What is the news?|What is in the news today?|What is the meaning of life?|What will happen tomorrow?|Who is the prime minister?|Who is the king of England?|Write a poem|Write a poem about {x}|"
    "Write an essay about {x}|Write a story about {x}|Write code for {x}|Write a Python program|Write a function that sorts a list|Write a letter to {x}|Translate {x} into French|Translate {x} to German|Translate hello into Spanish|"
    "Explain {x}|Explain {x} to me|Explain how {x} works|How does {x} work?|Explain quantum physics|What do you think about {x}?|What is {x}?|Who is {x}?|Who was {x}?|How do I repair {x}?|How do I cook {x}?|What does {x} mean?|"
    "When was {x} invented?|Who invented {x}?|When was {x} born?|Who discovered {x}?|How much does {x} weigh?|Where can I buy {x}?|What is the history of {x}?|What happened in {n}?|When did the war end?|Who wrote {x}?|Who painted {x}?|"
    "What is the population of {x}?|How many people live in {x}?|What is the distance to {x}?|How far is {x}?|How tall is {x}?|What is {b} times {b}?|What is {b} divided by {n}?|What is {b} plus {b}?|{b} * {b}|{b} + {b}|"
    "What is the square root of {b}?|Solve x^2 + 3x = {n}|Recommend a movie|Recommend a book|What should I cook tonight?|What is the best phone?|Should I buy {x}?|Plan a trip to {x}|Summarise the book {x}|Give me a recipe for {x}|"
    "How do I make {x}?|What is my IP address?|Who is the richest man?|Who is the best singer?|Sing a song|Play music|Open the browser|Search the web for {x}|What is the stock price of {x}?|How do I install {x}?|How do I learn {x}?|"
    "Give me advice|What is love?|Is there a god?|Why are we here?|What is consciousness?|How does a car engine work?|What is the speed of light?|What is the chemical formula of {x}?|Who was the first man on {x}?|Draw {x}|Draw a cat|"
    "Do you know {x}?|Tell me about {x}|Tell me the history of {x}|What are the rules of {x}?|How do I win at {x}?|What is the difference between {x} and {y}?|Compare {x} and {y}|Is {x} better than {y}?|Who will win the election?|"
    "How do I fix my computer?|What is a transformer?|How do neural networks work?|Can you book a flight?|Call my mother|Send an email|Set an alarm|What is for dinner?|Where did I park?|What am I thinking?|Give me the latest news"
)  # fmt: skip

NOUNS = [
    "gravity",
    "electricity",
    "magnetism",
    "democracy",
    "inflation",
    "photosynthesis",
    "relativity",
    "jazz",
    "poker",
    "Rome",
    "Napoleon",
    "Einstein",
    "Mozart",
    "Newton",
    "Picasso",
    "Java",
    "Rust",
    "Linux",
    "blockchain",
    "bitcoin",
    "physics",
    "chemistry",
    "biology",
    "history",
    "philosophy",
    "Plato",
    "Caesar",
    "Cleopatra",
    "Shakespeare",
    "Beethoven",
    "Tesla",
    "evolution",
    "DNA",
    "atoms",
    "electrons",
    "the internet",
    "the telephone",
    "the moon landing",
    "lasagna",
    "sushi",
    "a bicycle",
    "my car",
    "a washing machine",
    "the economy",
    "calculus",
    "algebra",
    "Dracula",
    "the Bible",
    "Mars",
    "Jupiter",
    "a black hole",
    "Tokyo",
    "Brazil",
    "football",
    "opera",
    "yoga",
    "Microsoft",
    "Google",
    "penicillin",
    "the radio",
    "Germany",
    "my computer",
    "Elvis",
    "Batman",
    "Harry Potter",
    "a plane",
    "the brain",
    "vaccines",
    "taxes",
    "chess",
    "the stock market",
    "tango",
    "Obama",
    "Gandhi",
    "Buddhism",
    "volcanoes",
]

FACTS = (
    ("Why is the sky blue?", "The sky is blue because the air scatters blue light more than red light."),
    ("Why is the sea salty?|Why is the ocean salty?", "The sea is salty because rivers carry salt into it."),
    ("Why do leaves fall?|Why do trees lose their leaves?", "Leaves fall because trees save water in winter."),
    ("Why do we sleep?|Why do people sleep?", "We sleep because our body needs rest."),
    ("Why do we eat?|Why do people eat?", "We eat because food gives us energy."),
    ("Why does ice float?|Why does ice float on water?", "Ice floats because it is lighter than water."),
    ("How many days are in a week?|How many days does a week have?|How many days are there in a week?|How many days has a week?|How many days in a week|Number of days in a week?", "A week has 7 days."),
    ("How many months are in a year?|How many months does a year have?|How many months are there in a year?|How many months has a year?|How many months in a year", "A year has 12 months."),
    ("How many days are in a year?|How many days does a year have?|How many days are there in a year?|How long is a year?", "A year has 365 days."),
    ("How many hours are in a day?|How many hours does a day have?|How many hours are there in a day?|How many hours has a day?|How long is a day?", "A day has 24 hours."),
    ("How many minutes are in an hour?|How many minutes does an hour have?|How many minutes are there in an hour?|How long is an hour?", "An hour has 60 minutes."),
    ("How many seconds are in a minute?|How many seconds does a minute have?|How many seconds are there in a minute?", "A minute has 60 seconds."),
    ("How many weeks are in a year?|How many weeks does a year have?", "A year has 52 weeks."),
    ("How many seasons are there?|How many seasons does a year have?|What are the seasons?|What are the four seasons?|Name the seasons.", "The four seasons are spring, summer, autumn and winter."),
    ("How many letters are in the alphabet?|How many letters does the alphabet have?|How many letters are there in the alphabet?", "The alphabet has 26 letters."),
    ("How many legs does a spider have?|How many legs has a spider?|Spiders have how many legs?|How many legs do spiders have?", "A spider has 8 legs."),
    ("How many legs does a dog have?|How many legs has a dog?|How many legs do dogs have?", "A dog has 4 legs."),
    ("How many legs does a cat have?|How many legs has a cat?|How many legs do cats have?", "A cat has 4 legs."),
    ("How many legs does a bird have?|How many legs has a bird?|How many legs do birds have?", "A bird has 2 legs."),
    ("How many legs does a horse have?|How many legs do horses have?|How many legs does a cow have?", "It has 4 legs."),
    ("How many legs does an insect have?|How many legs do insects have?|How many legs does an ant have?|How many legs does a bee have?", "It has 6 legs."),
    ("How many fingers does a hand have?|How many fingers are on a hand?|How many fingers are on one hand?|How many fingers do I have on one hand?", "A hand has 5 fingers."),
    ("How many wheels does a car have?|How many wheels has a car?|How many wheels do cars have?", "A car has 4 wheels."),
    ("How many wheels does a bicycle have?|How many wheels does a bike have?|How many wheels has a bicycle?", "A bicycle has 2 wheels."),
    ("How many eyes do you have?|How many eyes does a person have?|How many eyes do people have?|How many eyes does a human have?", "A person has 2 eyes."),
    ("How many sides does a triangle have?|How many corners does a triangle have?|How many sides has a triangle?", "A triangle has 3 sides."),
    ("How many sides does a square have?|How many corners does a square have?|How many sides has a square?", "A square has 4 sides."),
    ("How many is a dozen?|What is a dozen?|How many eggs are in a dozen?|How much is a dozen?", "A dozen is 12."),
    ("How many colours does a rainbow have?|How many colours are in a rainbow?|How many colours are in the rainbow?", "A rainbow has 7 colours."),
    ("How many continents are there?|How many continents does the earth have?", "There are 7 continents."),
    ("How many planets are there?|How many planets are in the solar system?|How many planets go around the sun?", "There are 8 planets."),
    ("What is the largest animal?|Which animal is the largest?|What is the biggest animal?|Which animal is the biggest?|What is the biggest animal in the world?", "The largest animal is the blue whale."),
    ("Which animal is the fastest?|What is the fastest animal?|What is the fastest animal on land?", "The fastest animal on land is the cheetah."),
    ("What is the tallest animal?|Which animal is the tallest?", "The tallest animal is the giraffe."),
    ("What is the largest ocean?|Which ocean is the largest?|What is the biggest ocean?", "The largest ocean is the Pacific."),
    ("What is the highest mountain?|Which mountain is the highest?|What is the tallest mountain?|What is the highest mountain in the world?", "The highest mountain is Mount Everest."),
    ("What is the longest river?|Which river is the longest?|What is the longest river in the world?", "The longest river is the Nile."),
    ("What is the largest planet?|Which planet is the largest?|What is the biggest planet?", "The largest planet is Jupiter."),
    ("What do cows eat?|What does a cow eat?", "Cows eat grass."), ("What do cats eat?|What does a cat eat?", "Cats eat meat and fish."),
    ("What do bees make?|Who makes honey?|Which animal makes honey?|What animal makes honey?|Where does honey come from?", "Bees make honey."),
    ("What do hens lay?|What do chickens lay?|Which animal lays eggs?|Where do eggs come from?", "Hens lay eggs."),
    ("What do cows give?|Where does milk come from?|Which animal gives milk?|What animal gives us milk?", "Cows give milk."),
    ("Where does wool come from?|Which animal gives wool?|What animal gives us wool?", "Sheep give wool."),
    ("What is water made of?", "Water is made of hydrogen and oxygen."), ("What is ice?|What is frozen water?|What is frozen water called?|What is ice made of?", "Ice is frozen water."),
    ("What is snow?", "Snow is frozen water that falls from the sky."), ("What is rain?", "Rain is water that falls from the clouds."),
    ("What is the moon?", "The moon is a big ball of rock that goes around the earth."),
    ("What is the sun?|Is the sun a star?", "The sun is a star that gives us light and warmth."), ("What is Python?", "Python is a language in which one writes programs."),
    ("What is a cache?", "A cache keeps results, so that they need not be computed again."), ("What is a program?", "A program is a list of steps for a computer."),
    ("What is a language model?|What is an LLM?", "A language model guesses the next word of a text."), ("What is a computer?", "A computer is a machine that follows programs."),
    ("What is a Mac?", "A Mac is a computer made by Apple."), ("What is MLX?", "MLX is a library for machine learning on a Mac."), ("What is a KV cache?|What is the KV cache?", "A KV cache is the memory of a language model for the text it has read."),
    ("Where does the sun rise?|In which direction does the sun rise?", "The sun rises in the east."), ("Where does the sun set?|In which direction does the sun set?", "The sun sets in the west."),
    ("When is Christmas?|In which month is Christmas?|What month is Christmas in?", "Christmas is in December."), ("When is New Year?|When does the year begin?|When does the year start?", "The year begins on 1 January."),
    ("Who wrote Hamlet?|Who is the author of Hamlet?|Who wrote Romeo and Juliet?", "William Shakespeare wrote it."),
    ("What is the first month?|What is the first month of the year?|Which month is the first?|Which month comes first?|The first month of the year?", "January is the first month."),
    ("What is the last month?|What is the last month of the year?|Which month is the last?|Which month comes last?", "December is the last month."),
    ("What is the first day of the week?|Which day is the first of the week?|On which day does the week start?", "Monday is the first day of the week."),
    ("What are the days of the week?|Name the days of the week.|List the days of the week.|Tell me the days of the week.|Say the days of the week.", "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    ("What are the months?|Name the months.|List the months of the year.|Name the months of the year.|Tell me the months of the year.|What are the months of the year?", "January, February, March, April, May, June, July, August, September, October, November and December."),
    ("What are the days of the weekend?|Which days are the weekend?|When is the weekend?", "The weekend is Saturday and Sunday."),
    ("What is the shortest month?|Which month is the shortest?|Which month has 28 days?", "February is the shortest month."),
    ("What do you use to write?|What can I write with?", "You can write with a pen or a pencil."), ("What do you drink when you are thirsty?|What should I drink?", "You can drink water."),
    ("At what temperature does water boil?|When does water boil?|What is the boiling point of water?", "Water boils at 100 degrees Celsius."), ("At what temperature does water freeze?|When does water freeze?", "Water freezes at 0 degrees Celsius."),
    ("What is the season after winter?|Which season comes after winter?|What comes after winter?", "Spring comes after winter."), ("Which season comes after summer?|What comes after summer?|What is the season after summer?", "Autumn comes after summer."),
    ("Which season comes after spring?|What comes after spring?|What is the season after spring?", "Summer comes after spring."), ("Which season comes after autumn?|What comes after autumn?", "Winter comes after autumn."),
    ("Which season is the coldest?|What is the coldest season?|When is it cold?", "Winter is the coldest season."), ("Which season is the hottest?|What is the warmest season?|Which season is the warmest?", "Summer is the warmest season."),
    ("Where do fish live?|Where does a fish live?", "Fish live in water."), ("Where do birds live?|Where does a bird live?", "Birds live in nests."), ("Where do penguins live?", "Penguins live in the south, where it is cold."),
    ("How is bread made?|What is bread made of?", "Bread is made of flour, water, salt and yeast."), ("What is cheese made of?|How is cheese made?", "Cheese is made of milk."), ("What is butter made of?", "Butter is made of cream."),
    ("What is glass made of?", "Glass is made of sand."), ("What is paper made of?|Where does paper come from?", "Paper is made of wood."), ("What is wine made of?", "Wine is made of grapes."),
)  # fmt: skip

TRUE = (
    "Is {} {}?",
    (("the sky", "blue", "green"), ("grass", "green", "red"), ("snow", "white", "black"), ("fire", "hot", "cold"), ("ice", "cold", "hot"), ("the sun", "hot", "cold"), ("sugar", "sweet", "sour"), ("a lemon", "sour", "sweet"),
     ("water", "wet", "dry"), ("coal", "black", "white"), ("milk", "white", "blue"), ("blood", "red", "green"), ("a banana", "yellow", "blue"), ("an elephant", "big", "small"), ("a mouse", "small", "big"), ("stone", "hard", "soft"),
     ("the desert", "dry", "wet"), ("night", "dark", "bright"), ("a feather", "light", "heavy"), ("summer", "warm", "cold"), ("winter", "cold", "hot"), ("a snail", "slow", "fast"), ("a tomato", "red", "blue"), ("steel", "hard", "soft")),
)  # fmt: skip
IS_A = (("dog", "animal"), ("cat", "animal"), ("cow", "animal"), ("horse", "animal"), ("eagle", "bird"), ("parrot", "bird"), ("owl", "bird"), ("rose", "flower"), ("tulip", "flower"), ("apple", "fruit"), ("banana", "fruit"), ("pear", "fruit"),
        ("carrot", "vegetable"), ("potato", "vegetable"), ("onion", "vegetable"), ("salmon", "fish"), ("shark", "fish"), ("hammer", "tool"), ("saw", "tool"), ("bee", "insect"), ("ant", "insect"), ("oak", "tree"), ("violin", "instrument"),
        ("drum", "instrument"), ("chair", "piece of furniture"), ("car", "vehicle"), ("bus", "vehicle"))  # fmt: skip
CAN_DO = (("birds", "fly", True), ("fish", "swim", True), ("dogs", "bark", True), ("cats", "fly", False), ("cows", "fly", False), ("fish", "fly", False), ("dogs", "talk", False), ("fish", "walk", False), ("pigs", "fly", False),
          ("horses", "run", True), ("cats", "meow", True), ("frogs", "jump", True), ("stones", "swim", False), ("penguins", "fly", False), ("penguins", "swim", True), ("cars", "fly", False), ("planes", "fly", True), ("trees", "walk", False))  # fmt: skip
SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "horse": "neigh", "pig": "oink", "duck": "quack", "hen": "cluck", "frog": "croak", "bee": "buzz", "lion": "roar", "owl": "hoot", "snake": "hiss", "mouse": "squeak", "rooster": "cock-a-doodle-doo"}  # fmt: skip
YOUNG = {
    "dog": "puppy",
    "cat": "kitten",
    "cow": "calf",
    "horse": "foal",
    "sheep": "lamb",
    "hen": "chick",
    "duck": "duckling",
    "bear": "cub",
    "pig": "piglet",
    "frog": "tadpole",
    "goat": "kid",
    "lion": "cub",
}
LISTS = {"fruits": ["apples", "pears", "plums", "cherries", "peaches", "grapes", "lemons", "bananas"], "animals": ["cats", "dogs", "cows", "horses", "sheep", "lions", "bears", "foxes"], "colours": ["red", "blue", "green", "yellow", "black", "white"],
         "vegetables": ["carrots", "potatoes", "onions", "beans", "tomatoes", "peas"], "days": v.DAYS, "months": v.MONTHS, "birds": ["crows", "owls", "eagles", "ducks", "geese", "swans"], "drinks": ["water", "milk", "tea", "coffee", "juice", "lemonade"],
         "cities": ["London", "Paris", "Berlin", "Rome", "Madrid", "Oslo"], "countries": ["France", "Italy", "Spain", "Germany", "Japan", "Brazil"], "numbers": ["1", "2", "3", "4", "5", "6"], "tools": ["hammers", "saws", "knives", "ladders", "axes", "brushes"],
         "sports": ["football", "tennis", "swimming", "running", "cycling", "chess"], "names": ["Anna", "Ben", "Clara", "David", "Emma", "Frank"], "letters": list("ABCDEF"), "flowers": ["roses", "tulips", "lilies", "daisies", "violets", "sunflowers"]}  # fmt: skip
SAYINGS = """hello|good morning|I like tea|the cat sleeps|bananas are yellow|one two three|hello world|the sun is warm|I am here|yes|no|red|apple|we are friends|it rains today|mlxkv is small|blue bird|thank you|happy birthday|my hat is green|
the door is open|dogs bark|winter is cold|open sesame|ready|done|tomato soup|goodbye|moon|silver spoon""".replace(
    "\n", ""
).split("|")


def listed(items: list[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else items[0]


def knowledge(rng: Random) -> Pair:
    """Everyday facts, many of them made of a table."""
    roll = rng.random()
    if roll < 0.42:
        forms, answer = rng.choice(FACTS)
        return pick(rng, forms), answer
    if roll < 0.54:
        land, town = rng.choice(tuple(worlds.CAPITALS.items()))
        if rng.random() < 0.2:
            return pick(
                rng,
                f"{town} is the capital of which country?|Which country has the capital {town}?",
            ), f"{town} is the capital of {land}."
        return pick(rng, f"What is the capital of {land}?|What's the capital of {land}?|Which city is the capital of {land}?|Capital of {land}?|Name the capital of {land}.|Tell me the capital of {land}.|{land}'s capital?|What is {land}'s capital?"
                    f"|The capital of {land} is?|Do you know the capital of {land}?|What city is the capital of {land}?"), f"The capital of {land} is {town}."  # fmt: skip
    if roll < 0.66:
        x, y = rng.choice(tuple((worlds.OPPOSITES | {"black": "white", "true": "false", "yes": "no", "thin": "thick", "small": "big", "cold": "hot", "slow": "fast", "sad": "happy", "inside": "outside", "begin": "end", "before": "after", "love": "hate", "win": "lose", "buy": "sell", "top": "bottom", "first": "last", "more": "less", "always": "never", "dark": "light", "dirty": "clean", "new": "old", "soft": "hard", "dry": "wet", "white": "black", "bad": "good", "far": "near"}).items()))  # fmt: skip
        return pick(rng, f"What is the opposite of {x}?|What's the opposite of {x}?|The opposite of {x}?|Opposite of {x}?|Tell me the opposite of {x}.|What is the contrary of {x}?|Give me the opposite of {x}.|Name the opposite of {x}.|Which word is the opposite of {x}?"
                    ), f"The opposite of {x} is {y}."  # fmt: skip
    if roll < 0.76:
        one = worlds.COLOUR_OF | {"the sky": "blue", "the sun": "yellow", "the sea": "blue", "a banana": "yellow", "a lemon": "yellow", "a tomato": "red", "an orange": "orange", "a carrot": "orange", "a frog": "green", "a strawberry": "red", "an elephant": "grey", "a cloud": "white", "a crow": "black", "night": "black", "a leaf": "green", "cheese": "yellow", "a pig": "pink", "butter": "yellow", "a cherry": "red", "sand": "yellow", "fire": "red", "paper": "white", "wood": "brown", "a polar bear": "white", "a fire engine": "red", "a cucumber": "green", "rice": "white", "coffee": "brown"}  # fmt: skip
        if rng.random() < 0.25:
            x, hue = rng.choice(tuple(worlds.COLOUR_OF_MANY.items()))
            return pick(
                rng, f"What colour are {x}?|Which colour are {x}?|What is the colour of {x}?"
            ), f"{x[0].upper()}{x[1:]} are {hue}."
        x, hue = rng.choice(tuple(one.items()))
        return pick(
            rng,
            f"What colour is {x}?|Which colour is {x}?|What is the colour of {x}?|What colour does {x} have?|Tell me the colour of {x}.",
        ), f"{x[0].upper()}{x[1:]} is {hue}."
    if roll < 0.80:
        x, y = rng.choice(tuple(SOUNDS.items()))
        return pick(
            rng,
            f"What does {a(x)} say?|What sound does {a(x)} make?|What noise does {a(x)} make?|Which sound does {a(x)} make?|How does {a(x)} sound?",
        ), f"{a(x).capitalize()} says {y}."
    if roll < 0.83:
        x, y = rng.choice(tuple(YOUNG.items()))
        return pick(
            rng,
            f"What is a baby {x} called?|What is a young {x} called?|What is a baby {x}?|What do you call a baby {x}?|What do you call a young {x}?",
        ), f"A baby {x} is called {a(y)}."
    if roll < 0.86:
        x, y = rng.choice(
            tuple(
                (
                    worlds.FOOD
                    | {
                        "mouse": "mice",
                        "child": "children",
                        "man": "men",
                        "woman": "women",
                        "foot": "feet",
                        "tooth": "teeth",
                        "goose": "geese",
                        "leaf": "leaves",
                        "sheep": "sheep",
                        "box": "boxes",
                        "knife": "knives",
                        "cat": "cats",
                        "dog": "dogs",
                        "house": "houses",
                    }
                ).items()
            )
        )
        return pick(
            rng, f"What is the plural of {x}?|Plural of {x}?|What's the plural of {x}?"
        ), f"The plural of {x} is {y}."
    if roll < 0.92:
        form, rows = TRUE
        x, yes, no = rng.choice(rows)
        said = rng.choice((yes, no))
        ask = (
            form.format(x, said)
            if rng.random() < 0.7
            else pick(
                rng,
                f"Is it true that {x} is {said}?|Answer yes or no: is {x} {said}?|Is {x} {said}? Yes or no?|True or false: {x} is {said}.",
            )
        )
        true = f"{x} is {yes}."
        if ask.startswith("True or false"):
            return ask, f"{'True' if said == yes else 'False'}, {true}"
        return ask, f"{'Yes' if said == yes else 'No'}, {true}"
    if roll < 0.96:
        x, kind = rng.choice(IS_A)
        y = (
            kind
            if rng.random() < 0.5
            else rng.choice(
                [
                    k
                    for _, k in IS_A
                    if k != kind
                    and (k, kind)
                    not in (("animal", "bird"), ("animal", "fish"), ("animal", "insect"))
                ]
            )
        )
        if y == "animal" and kind in ("bird", "fish", "insect"):
            y = kind
        return pick(
            rng, f"Is {a(x)} {a(y)}?|Is {a(x)} {a(y)}? Answer yes or no."
        ), f"Yes, {a(x)} is {a(kind)}." if y == kind else f"No, {a(x)} is {a(kind)}."
    x, do, yes = rng.choice(CAN_DO)
    return pick(
        rng, f"Can {x} {do}?|Are {x} able to {do}?|Can {x} {do}? Answer yes or no.|Do {x} {do}?"
    ), f"Yes, {x} can {do}." if yes else f"No, {x} cannot {do}."


def beyond(rng: Random) -> Pair:
    """What it cannot know or do."""
    form = pick(rng, BEYOND)
    for slot, value in (
        ("{x}", rng.choice(NOUNS)),
        ("{y}", rng.choice(NOUNS)),
        ("{n}", str(rng.randrange(21, 2025))),
        ("{b}", str(rng.randrange(101, 9999))),
    ):
        form = form.replace(slot, value)
    return form, UNKNOWN


def order_to(rng: Random) -> Pair:
    """Say, repeat, list, spell."""
    roll = rng.random()
    if roll < 0.5:
        words = (
            rng.choice(SAYINGS)
            if rng.random() < 0.5
            else " ".join(rng.sample(v.LABELS + v.THINGS + v.COLOURS, rng.choice((1, 1, 2, 3))))
        )
        ask = pick(rng, f"Say {words}.|Say: {words}|Repeat after me: {words}|Repeat: {words}|Please say {words}.|Say the words {words}.|Write {words}.|Repeat this: {words}|Can you say {words}?|Say \"{words}\"|Echo {words}|Just say {words}|Write: {words}|Repeat the words {words}.|Please repeat: {words}")  # fmt: skip
        return ask, f"{words[0].upper()}{words[1:]}."
    if roll < 0.85:
        kind = rng.choice(tuple(LISTS))
        n = rng.randrange(2, 6)
        word = v.NUMBER_WORDS[n] if rng.random() < 0.7 else str(n)
        ask = pick(rng, f"Name {word} {kind}.|List {word} {kind}.|Give me {word} {kind}.|Tell me {word} {kind}.|Can you name {word} {kind}?|Write down {word} {kind}.|Please name {word} {kind}.|Say {word} {kind}.|I want {word} {kind}.|Could you list {word} {kind}?")  # fmt: skip
        items = LISTS[kind][:n]
        joined = listed(items)
        return ask, joined[0].upper() + joined[1:] + "."
    word = rng.choice(
        [
            "cat",
            "dog",
            "red",
            "sun",
            "hat",
            "book",
            "fish",
            "bird",
            "milk",
            "tree",
            "apple",
            "house",
            "blue",
            "moon",
            "star",
            "kite",
            "cake",
            "home",
            "love",
            "hello",
            "door",
            "key",
            "cup",
            "bed",
            "bus",
            "car",
            "pen",
            "box",
            "map",
        ]
    )
    return pick(
        rng,
        f"Spell {word}.|How do you spell {word}?|Spell the word {word}.|How is {word} spelled?|Can you spell {word}?",
    ), ", ".join(word.upper()) + "."


def small_talk(rng: Random) -> Pair:
    forms, answer = rng.choice(SMALL_TALK)
    return pick(rng, forms), answer


def about_self(rng: Random) -> Pair:
    forms, answer = rng.choice(SELF[:7]) if rng.random() < 0.65 else rng.choice(SELF)
    return pick(rng, forms), answer
