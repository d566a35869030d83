# ruff: noqa: E501 - one step or answer a line reads better than wrapped ones
"""More plots, away from home; for their form and their slots see plots_home.py."""

from mlxkv.texts.worlds.plots_home import Plot

RACE: Plot = (
    (
        ("{a} and {b} wanted to know who was faster.", "\"I am faster than you,\" said {b} to {a}.", "There was a race in the village, and {a} and {b} took part."),
        ("They started {out}, and the goal was the old bridge.", "The race began {out}.", "All the people waited {out} to see the start."),
        ("At first {b} was in front.", "{b} ran like the wind, and {a} fell behind.", "{b} laughed and did not look back."),
        ("But {b} became tired and sat down under a tree.", "Then {b} stopped to eat some {foods}.", "In the middle of the way, {b} stopped to talk to a {animal}."),
        ("{a} ran on, slowly and calmly.", "{a} did not stop, not even once.", "{a} thought only of the next step."),
        ("So {a} won the race.", "When {b} arrived, {a} was already there.", "In the end {a} won, and everybody cheered."),
        ("The prize was a {thing}.", "{a} got a {thing} as a prize.", "They gave {a} a {thing}."),
        ("\"You have earned it,\" said {b}.", "{b} was not angry and shook {hers} hand.", "The next year, {b} did not stop to rest."),
    ),
    (
        ("who won the race", "who won the race", "{a} won the race."),
        ("what was the prize", "what the prize was", "The prize was a {thing}."),
    ),
)  # fmt: skip

LETTER: Plot = (
    (
        ("One {time}, {a} got a letter.", "There was a letter for {a} on the table.", "The postman brought {a} a letter."),
        ("It came from {b}, who lived far away.", "{b} had written it.", "{she} saw at once that it was from {b}."),
        ("\"Come and visit me,\" it said.", "\"I have a new house near the {place2},\" it said.", "\"I am alone here, and I miss you,\" wrote {b}."),
        ("{a} packed a bag with {dish} and {n} {foods}.", "{she} put on {hers} best coat and left.", "{she} counted {hers} money and bought a ticket."),
        ("The train was slow, and outside it was {weather}.", "{she} sat in the train for {n} hours.", "On the way {she} looked out of the window."),
        ("{b} was waiting {at}.", "{b} stood {at} and waved.", "When {she} arrived, {b} was already waiting {at}."),
        ("They talked until late at night.", "They had so much to tell each other.", "They drank tea and talked about the old days."),
        ("{a} stayed for {n} weeks.", "When {she} left, both were a little sad.", "\"Next year you must visit me,\" said {a}."),
    ),
    (
        ("who wrote the letter", "who wrote the letter", "{b} wrote the letter."),
        ("where did {b} wait", "where {b} waited", "{b} waited {at}."),
    ),
)  # fmt: skip

GARDEN: Plot = (
    (
        ("In spring, {a} put some seeds in the ground.", "{a} wanted to have a garden behind the house.", "{b} gave {a} a bag of seeds in spring."),
        ("Every {time} {she} gave them water.", "{she} looked at them day after day.", "For a long time nothing happened."),
        ("\"Be patient,\" said {b}.", "\"Plants need time,\" said {b}.", "{b} told {her} to wait."),
        ("Then it was hot for weeks, and the ground became dry.", "One night there was a storm.", "Then a {animal} came and ate some of the leaves."),
        ("{a} built a small fence.", "{a} worried and hardly slept.", "{a} carried water from the river."),
        ("In summer there were green plants everywhere.", "After {n} weeks, the first leaves came up.", "Slowly the plants grew and grew."),
        ("In autumn {she} had {n} baskets of {foods}.", "At last {she} could pick the {foods}.", "In autumn the {foods} were ready."),
        ("{she} gave half of them to {b}.", "{a} and {b} cooked {dish} with them.", "The neighbours had never eaten better {foods}."),
    ),
    (
        ("what did {a} grow", "what {a} grew", "{a} grew {foods}."),
        ("who told {a} to wait", "who told {a} to wait", "{b} told {a} to wait."),
    ),
)  # fmt: skip

BOAT: Plot = (
    (
        ("{a} and {b} built a small boat.", "{a} had an old boat, and {b} wanted to sail.", "On a {weather} {time}, {a} and {b} took a boat out on the lake."),
        ("They painted it {colour}.", "The boat was as {colour} as paint could make it.", "The boat was {colour} and not very big."),
        ("{a} held the rope, and {b} looked at the map.", "The water was calm, and the wind was soft.", "They brought {dish} and a bottle of water."),
        ("After an hour they saw an island.", "Far out there was a little island.", "Suddenly {b} pointed at an island."),
        ("On the island they found a {thing}.", "There they found a {thing} in the sand.", "Behind a rock lay a {thing}."),
        ("\"Who may have lost it?\" asked {b}.", "\"It must be very old,\" said {a}.", "Nobody knew how it had come there."),
        ("When the sun went down, they sailed back.", "Then the wind turned, and they had to go back.", "It became dark, and a light showed them the way home."),
        ("They gave the {thing} to the museum.", "The {thing} now stands on {a}'s shelf.", "They have kept their secret until today."),
    ),
    (
        ("what did they find on the island", "what they found on the island", "They found a {thing} on the island."),
        ("what colour was the boat", "what colour the boat was", "The boat was {colour}."),
    ),
)  # fmt: skip

SCHOOL: Plot = (
    (
        ("It was {a}'s first day at school.", "{a} was new at school and knew nobody.", "On the first day of school, {a} was {mood}."),
        ("{she} sat alone in the last row.", "All the others were talking and laughing.", "{she} did not dare to speak."),
        ("Then {b} sat down beside {her}.", "A child called {b} came up to {her}.", "\"Is this place free?\" asked {b}."),
        ("{b} gave {her} some {foods}.", "{b} showed {her} a {thing}.", "{b} lent {her} a {colour} pencil."),
        ("In the break they played {at}.", "They found out that they both liked music.", "They talked about their favourite books."),
        ("The teacher asked a hard question, and {a} knew the answer.", "In the lesson they learned about the {animal}.", "They wrote the numbers from one to {n}."),
        ("After school they walked home together.", "When {a} came home, {she} told everything.", "\"How was it?\" asked {hers} mother. \"It was lovely,\" said {a}."),
        ("Now {b} is {hers} best friend.", "The next day, {she} was the first at school.", "From then on {she} liked to go to school."),
    ),
    (
        ("who sat down beside {a}", "who sat down beside {a}", "{b} sat down beside {a}."),
    ),
)  # fmt: skip

PAINTER: Plot = (
    (
        ("{a} liked to paint more than anything.", "{a} was a painter who lived near the {place}.", "Every {time}, {a} painted a picture."),
        ("One day {she} painted a {animal}.", "{hers} best picture showed a {animal}.", "{b} asked {her} to paint a {animal}."),
        ("{she} used only {colour} and {colour2}.", "The {animal} was {colour}, and the sky was {colour2}.", "It took {her} {n} days."),
        ("People came to look at it {at2}.", "It was shown {at2}.", "{she} hung it on a wall {at2}."),
        ("\"A {colour} {animal}?\" they asked. \"How odd!\"", "Some people liked it, and some did not.", "Nobody wanted to buy it."),
        ("But {b} bought it for {n} coins.", "Only {b} understood it, and {bshe} bought it.", "Then {b} came and paid {n} coins for it."),
        ("With the money {a} bought new brushes.", "{a} was proud and began the next picture at once.", "That night {a} could not sleep for joy."),
    ),
    (
        ("what did {a} paint", "what {a} painted", "{a} painted a {animal}."),
        ("who bought the picture", "who bought the picture", "{b} bought the picture."),
    ),
)  # fmt: skip

CAT_AND_MOUSE: Plot = (
    (
        ("Once upon a time, a mouse lived {at}.", "There was once a clever mouse that lived {at}.", "A little mouse had its home {at}."),
        ("A big {colour} cat lived there too.", "But there was also a {colour} cat.", "Every night a {colour} cat came to catch it."),
        ("The mouse was afraid and stayed in its hole.", "\"I must find a way,\" thought the mouse.", "The mouse never slept well."),
        ("One {time}, the cat got its foot in a rope.", "One {time}, the cat fell into a bucket.", "One {time}, the cat could not get out of a box."),
        ("\"Please help me,\" said the cat.", "The cat cried for hours, but nobody came.", "\"I will never hunt you again,\" said the cat."),
        ("The mouse thought about it, and then it helped.", "The mouse was kind and set the cat free.", "With its small teeth, the mouse helped the cat."),
        ("Since that day they have been friends.", "The cat kept its word.", "Now they share their {dish} every {time}."),
    ),
    (
        ("where did the mouse live", "where the mouse lived", "The mouse lived {at}."),
        ("what colour was the cat", "what colour the cat was", "The cat was {colour}."),
    ),
)  # fmt: skip

MUSIC: Plot = (
    (
        ("{a} heard somebody sing {at}.", "One {weather} {time}, there was music {at}, and {a} stopped.", "{a} found an old violin and wanted to learn to play it."),
        ("It was {b}, who knew many songs.", "{b} could play the drum, the flute and the violin.", "{b} was the best singer in town."),
        ("\"Can you teach me?\" asked {a}.", "{a} asked {b} for lessons.", "\"I want to do that too,\" said {a}."),
        ("They practised {n} hours a day.", "In the beginning it sounded terrible.", "The neighbours closed their windows."),
        ("After some months it sounded good.", "But {a} learned fast.", "Week after week it became better."),
        ("In summer they played together {at2}.", "They gave a concert {at2}.", "On {a}'s birthday they played {at2}."),
        ("{n} people came, and all of them danced.", "The people clapped for a long time.", "Even the {animals} seemed to listen."),
        ("\"One more song!\" everybody shouted.", "{a} has never been so happy.", "{b} gave {a} a {thing} as a present."),
    ),
    (
        ("who taught {a}", "who taught {a}", "{b} taught {a}."),
        ("where did they play", "where they played", "They played {at2}."),
    ),
)  # fmt: skip

SHOP: Plot = (
    (
        ("{a} opened a small shop near the {place2}.", "{a} had a little shop.", "Last year, {a} bought an old shop."),
        ("{she} sold {foods} and {dish}.", "There one could buy {foods} and {dish}.", "{she} sold {foods} from the garden, and fresh {dish}."),
        ("On the first day nobody came.", "At first there were few people.", "{she} waited all day, but only a {animal} looked in."),
        ("{b} had an idea.", "\"You need a sign,\" said {b}.", "Then {b} helped {her}."),
        ("They painted a big {colour} sign.", "They hung a {colour} flag over the door.", "They put a {colour} lamp in the window."),
        ("The next morning there was a long line of people.", "From then on people came from everywhere.", "Soon everybody in town knew the shop."),
        ("In one day {she} sold {n} {foods} to each of them.", "By noon everything was sold.", "{a} had to work until late."),
        ("\"I could not have done it without you,\" {she} said to {b}.", "Now {b} works in the shop too.", "{b} gets {dish} for free every {time}."),
    ),
    (
        ("what did {a} sell", "what {a} sold", "{a} sold {foods} and {dish}."),
        ("who helped {a}", "who helped {a}", "{b} helped {a}."),
    ),
)  # fmt: skip

AWAY = (RACE, LETTER, GARDEN, BOAT, SCHOOL, PAINTER, CAT_AND_MOUSE, MUSIC, SHOP)
