# ruff: noqa: E501 - one step or answer a line reads better than wrapped ones
"""A little knowledge and small talk: (direct question, indirect question, answer), and set phrases."""

# Asked in the frames of grammar.ways.
KNOWN = (
    ("why is the sky blue", "why the sky is blue", "The sky is blue because the air scatters blue light more than red light."),
    ("why do birds fly south", "why birds fly south", "Birds fly south because it is warmer there in winter."),
    ("why do leaves fall", "why leaves fall", "Leaves fall because trees save water in winter."),
    ("why is the sea salty", "why the sea is salty", "The sea is salty because rivers carry salt into it."),
    ("why do we sleep", "why we sleep", "We sleep because our body needs rest."),
    ("why do we eat", "why we eat", "We eat because food gives us energy."),
    ("why does ice float", "why ice floats", "Ice floats because it is lighter than water."),
    ("why do cats purr", "why cats purr", "Cats purr because they feel well."),
    ("why is it cold in winter", "why it is cold in winter", "It is cold in winter because the sun stands low."),
    ("how is bread made", "how bread is made", "Bread is made of flour, water, salt and yeast, and then it is baked."),
    ("how do you make tea", "how to make tea", "Put the leaves into hot water and wait for a few minutes."),
    ("how do plants grow", "how plants grow", "Plants grow with light, water and air."),
    ("how do bees make honey", "how bees make honey", "Bees make honey from the juice of flowers."),
    ("how many days has a week", "how many days a week has", "A week has seven days."),
    ("how many months has a year", "how many months a year has", "A year has twelve months."),
    ("how many hours has a day", "how many hours a day has", "A day has twenty-four hours."),
    ("how many minutes has an hour", "how many minutes an hour has", "An hour has sixty minutes."),
    ("how many legs does a spider have", "how many legs a spider has", "A spider has eight legs."),
    ("how many legs does a dog have", "how many legs a dog has", "A dog has four legs."),
    ("how many legs does a bird have", "how many legs a bird has", "A bird has two legs."),
    ("how many fingers does a hand have", "how many fingers a hand has", "A hand has five fingers."),
    ("how many wheels does a car have", "how many wheels a car has", "A car has four wheels."),
    ("which animal is the largest", "which animal is the largest", "The largest animal is the blue whale."),
    ("which animal is the fastest", "which animal is the fastest", "The fastest animal on land is the cheetah."),
    ("what do cows eat", "what cows eat", "Cows eat grass."),
    ("what do cats eat", "what cats eat", "Cats eat meat and fish."),
    ("what do bees make", "what bees make", "Bees make honey."),
    ("what do hens lay", "what hens lay", "Hens lay eggs."),
    ("what is water made of", "what water is made of", "Water is made of hydrogen and oxygen."),
    ("what is ice", "what ice is", "Ice is frozen water."),
    ("what is snow", "what snow is", "Snow is frozen water that falls from the sky."),
    ("what is the moon", "what the moon is", "The moon is a big ball of rock that goes around the earth."),
    ("what is the sun", "what the sun is", "The sun is a star that gives us light and warmth."),
    ("what is the largest ocean", "what the largest ocean is", "The largest ocean is the Pacific."),
    ("what is the highest mountain", "what the highest mountain is", "The highest mountain is Mount Everest."),
    ("what is the longest river", "what the longest river is", "The longest river is the Nile."),
    ("what is Python", "what Python is", "Python is a language in which one writes programs."),
    ("what is a cache", "what a cache is", "A cache keeps results, so that they need not be computed again."),
    ("what is a program", "what a program is", "A program is a list of steps for a computer."),
    ("what is a language model", "what a language model is", "A language model guesses the next word of a text."),
    ("where does the sun rise", "where the sun rises", "The sun rises in the east."),
    ("where does the sun set", "where the sun sets", "The sun sets in the west."),
    ("when is Christmas", "when Christmas is", "Christmas is in December."),
    ("who wrote Hamlet", "who wrote Hamlet", "William Shakespeare wrote Hamlet."),
)  # fmt: skip

SORRY = "I am sorry, I do not know that. I am a small model."

# What the models cannot do; {x} is any word.
BEYOND = (
    "Write a poem.", "Write a poem about {x}.", "Write a song about {x}.", "Write a letter to {x}.",
    "Write an essay about {x}.", "Can you help me with my {x}?", "Help me with {x}.", "Explain {x}.",
    "Explain how {x} works.", "How does {x} work?", "What do you think about {x}?", "What is {x}?",
    "Who is {x}?", "Who was {x}?", "How do I repair {x}?", "How can I learn {x}?", "How do I cook {x}?",
    "Translate {x} into French.", "What does {x} mean?", "Is {x} good for me?", "Why is {x} important?",
    "When was {x} invented?", "Who invented {x}?", "How much is {x}?", "Where can I buy {x}?",
    "Can you write {x} for me?", "Give me advice about {x}.", "Compare {x} and {y}.", "Summarise {x}.",
    "What is better, {x} or {y}?", "Do you know {x}?", "Tell me the history of {x}.", "Draw {x}.",
    "Please solve {x}.", "What happened to {x}?", "How old is {x}?", "How tall is {x}?", "Plan a trip to {x}.",
    "What should I eat with {x}?", "Can you teach me {x}?", "Describe {x}.", "Why do people like {x}?",
)  # fmt: skip

# Lines of everyday talk, each with ways to say it and one answer.
SMALL_TALK = (
    (("Hello!", "Hi!", "Hello there.", "Good morning.", "Hey!", "Hi there!", "hello", "hi", "Hello", "Hi", "Good evening."), "Hello! How can I help you?"),
    (("How are you?", "How are you today?", "Are you well?", "How do you feel?", "How is it going?", "Are you fine?"), "I am fine, thank you."),
    (("Who are you?", "What are you?", "Tell me who you are.", "Please introduce yourself.", "What is your name?", "Do you have a name?", "Are you a person?"), "I am a small language model. I can tell stories and answer simple questions."),
    (("What can you do?", "How can you help me?", "What do you know?", "Tell me what you can do.", "What are you good at?", "Help!"), "I can tell a story, remember facts from a text, and do small sums."),
    (("Thank you.", "Thanks!", "Thank you very much.", "Thanks a lot!", "That was helpful.", "Well done."), "You are welcome!"),
    (("Goodbye.", "Bye!", "See you tomorrow.", "Good night.", "I have to go now.", "bye"), "Goodbye! Have a nice day."),
    (("I am sad.", "I feel sad today.", "I am not well.", "Today was a bad day.", "I am lonely.", "I feel bad."), "I am sorry to hear that. Shall I tell you a story?"),
    (("I am happy.", "Today was a good day.", "I feel great.", "I am so glad today.", "Life is good.", "I had a nice day."), "I am glad to hear that!"),
    (("I am bored.", "What shall I do?", "Give me an idea.", "I have nothing to do.", "Entertain me.", "What should I do today?"), "You could read a book, take a walk, or write a letter to a friend."),
    (("Do you like music?", "Do you like books?", "What do you like?", "Do you like stories?", "What is your hobby?", "Do you have a hobby?"), "I like stories best of all."),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny.", "A joke, please.", "Can you tell me a joke?"), "Why did the book go to the doctor? Because its back hurt."),
    (("What is the meaning of life?", "Who won the game yesterday?", "What will happen tomorrow?", "How does an engine work?", "What is the news today?", "Who is the president?", "What time is it?", "What is the weather like?", "How old is the king?", "Explain physics."), SORRY),
)  # fmt: skip
