# ruff: noqa: E501 - one step or answer a line reads better than wrapped ones
"""Plots: short stories as steps, each step said in one of several ways, with questions about them.

Slots: {a} the hero with {she} {her} {hers}, {b} a friend with {bshe} {bher}; {thing} 'red ball';
{place} {at} {place2} {at2}; {spot} 'in the box'; {foods} plural; {n} a number; {animal}; {weather};
{time}; {mood}; {dish}; {job}; {out} a place outside. Steps are capitalised when they are filled in.
"""

# (steps, questions); a question is (direct, indirect, answer)
Plot = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, str, str], ...]]

LOST: Plot = (
    (
        ("One {weather} {time}, {a} could not find {hers} {thing}.", "{a} lost {hers} {thing} on a {weather} {time}.", "On a {weather} {time}, {a} lost {hers} {thing}."),
        ("{she} had played with it all week.", "It was a present from {hers} grandmother.", "{she} liked it more than anything else."),
        ("First {she} looked {at}, but it was not there.", "{she} looked {at}, but there was nothing.", "{she} searched {at} for a long time."),
        ("\"Have you seen my {thing}?\" {she} asked {b}.", "{she} asked {b} for help.", "\"Please help me,\" {she} said to {b}."),
        ("\"Let us look together,\" said {b}.", "{b} was happy to help.", "\"Do not worry,\" said {b}. \"We will find it.\""),
        ("At last they found it {spot} {at2}.", "In the end it was {spot} {at2}.", "After an hour, they found it {spot} {at2}."),
        ("{a} laughed and thanked {b}.", "\"Thank you!\" said {a}.", "{a} was so glad that {she} danced."),
        ("From that day on, {she} was more careful.", "Since then, {she} has always put it back in its place.", "They went home before it was dark."),
    ),
    (
        ("what did {a} lose", "what {a} lost", "{a} lost {hers} {thing}."),
        ("who helped {a}", "who helped {a}", "{b} helped {a}."),
        ("where did they find it", "where they found it", "They found it {spot} {at2}."),
    ),
)  # fmt: skip

BAKING: Plot = (
    (
        ("{a} wanted to bake a cake for {b}.", "It was {b}'s birthday, and {a} wanted to bake a cake.", "{a} and {bher} old friend {b} planned a party, and {a} baked a cake."),
        ("{she} needed {n} {foods} and some flour.", "The cake needed {n} {foods}.", "For the cake {she} took {n} {foods}."),
        ("There was no sugar {at}, so {she} used honey.", "{she} worked {at} the whole {time}.", "{she} sang a song while {she} worked {at}."),
        ("The first cake was burnt, and {she} was {mood}.", "The oven was too hot, and the first cake turned black.", "{she} forgot the clock, and the first cake was burnt."),
        ("But {she} did not give up.", "So {she} began again.", "{she} tried once more."),
        ("The second cake smelled wonderful.", "This time the cake was golden and soft.", "The next cake was perfect."),
        ("When {b} came in, {bshe} smiled.", "{b} could not believe it.", "\"Is this for me?\" asked {b}."),
        ("They ate the cake together and were happy.", "Together they ate it all.", "It was the best cake that {b} had ever eaten."),
    ),
    (
        ("for whom did {a} bake the cake", "for whom {a} baked the cake", "{a} baked the cake for {b}."),
        ("where did {a} work", "where {a} worked", "{a} worked {at}."),
    ),
)  # fmt: skip

ANIMAL: Plot = (
    (
        ("{a} saw a little {animal} {at}.", "One {time}, {a} met a small {animal} {at}.", "There was a young {animal} {at}, and {a} saw it first."),
        ("It was cold and hungry.", "The {animal} looked tired.", "It had hurt its leg."),
        ("{she} gave it some {foods} and water.", "{she} brought it a blanket and some {foods}.", "\"You poor thing,\" {she} said, and {she} gave it some {foods}."),
        ("\"May I keep it?\" {she} asked {b}.", "{b} came to see it too.", "{she} told {b} about it."),
        ("\"It needs a warm place,\" said {b}.", "\"We must be kind to it,\" said {b}.", "{b} said that it should rest."),
        ("They made a bed for it {spot}.", "So they let it sleep {spot}.", "They put a soft bed {spot}."),
        ("After {n} days, the {animal} was strong again.", "Soon the {animal} felt better.", "In {n} days, it could run."),
        ("It followed {a} wherever {she} went.", "Now the {animal} and {a} are good friends.", "Every {time} it waits for {a} {at}."),
    ),
    (
        ("which animal did {a} see", "which animal {a} saw", "{a} saw a {animal}."),
        ("where did the {animal} sleep", "where the {animal} slept", "The {animal} slept {spot}."),
    ),
)  # fmt: skip

TRIP: Plot = (
    (
        ("{a} and {b} wanted to see the {place2}.", "On a {weather} day, {a} and {b} set out for the {place2}.", "{a} and {b} made a trip to the {place2}."),
        ("They packed some {foods} and {dish}.", "{a} carried the {foods}, and {b} carried the {dish}.", "In their bag they had {dish} and {n} {foods}."),
        ("The way was long, but the air was fresh.", "They walked for hours and talked about many things.", "On the way they sang old songs."),
        ("At noon they rested {at}.", "They stopped {at} and ate something.", "When they were tired, they sat down {at}."),
        ("Suddenly it began to rain.", "Then a strong wind came up.", "Dark clouds covered the sky."),
        ("{b} was afraid, but {a} stayed calm.", "\"I want to go home,\" said {b}. \"It will soon be over,\" said {a}.", "{a} shared {hers} coat with {b}."),
        ("When they arrived, the sun was shining again.", "In the end they reached the {place2}, wet but happy.", "At last they saw the {place2} in front of them."),
        ("{a} drew a picture of it.", "They stayed until the stars came out.", "It was a day that they never forgot."),
    ),
    (
        ("where did {a} and {b} want to go", "where {a} and {b} wanted to go", "They wanted to go to the {place2}."),
        ("where did they rest", "where they rested", "They rested {at}."),
    ),
)  # fmt: skip

NOISE: Plot = (
    (
        ("In the middle of the night, {a} heard a noise.", "A strange noise woke {a} in the night.", "{a} could not sleep, because there was a noise."),
        ("It came from the {place}.", "It seemed to come from the {place}.", "Something was moving in the dark, and it sounded as if it came from the {place}."),
        ("{she} took a candle and got up.", "{hers} heart beat fast, but {she} was curious.", "\"Who is there?\" {she} called, but nobody answered."),
        ("{she} woke {b}, and they went to look.", "{b} had heard it too.", "\"Do you hear that?\" {she} asked {b}."),
        ("Slowly they opened the door.", "Step by step they came nearer.", "They listened and held their breath."),
        ("It was only a {animal} that was looking for food.", "There sat a {animal}, and it looked at them with big eyes.", "A {animal} had come in through the window."),
        ("They laughed until they cried.", "{b} laughed loudly.", "\"What a night!\" said {b}."),
        ("Then everybody went back to bed.", "They gave it some {dish} and went back to sleep.", "In the morning it was gone."),
    ),
    (
        ("what made the noise", "what made the noise", "A {animal} made the noise."),
        ("where did the noise come from", "where the noise came from", "The noise came from the {place}."),
    ),
)  # fmt: skip

WORK: Plot = (
    (
        ("{a} wanted to become a {job}.", "Since {she} was a child, {a} had wanted to be a {job}.", "\"One day I will be a {job},\" said {a}."),
        ("Every {time} {she} practised {at}.", "{she} read every book about it {at}.", "{she} worked hard {at}."),
        ("Some people laughed at {her}.", "It was not easy, and {she} made many mistakes.", "At first nothing went well."),
        ("Only {b} believed in {her}.", "But {b} said, \"Do not give up.\"", "{b} helped {her} with kind words."),
        ("After {n} years, {she} was better than anyone else.", "The years went by, and {she} learned a lot.", "Step by step {she} got better."),
        ("Now people come from far away to see {hers} work.", "Today {she} has a small shop near the {place2}.", "Now {she} works near the {place2}."),
        ("{b} is very proud of {her}.", "{she} still thanks {b} for {bher} help.", "{b} visits {her} every week."),
    ),
    (
        ("what did {a} want to become", "what {a} wanted to become", "{a} wanted to become a {job}."),
        ("who believed in {a}", "who believed in {a}", "{b} believed in {a}."),
    ),
)  # fmt: skip

GIFT: Plot = (
    (
        ("{a} had saved {n} coins to buy a gift for {b}.", "{a} wanted to give {b} a gift, and {she} had {n} coins.", "With {n} coins in {hers} pocket, {a} went to buy a gift for {b}."),
        ("At the market there were so many nice things.", "{she} looked at everything on the market.", "The market was full of people."),
        ("A {thing} was too expensive.", "There was a {thing2}, but it cost too much.", "{she} did not like the {foods}, and the flowers were too dear."),
        ("In a corner {she} saw a {thing}.", "Then {she} found a {thing}.", "An old woman sold {her} a {thing}."),
        ("\"That is just right,\" {she} thought.", "It was just what {she} wanted.", "It was not new, but it was lovely."),
        ("{she} put it into a box with a {colour} ribbon.", "{she} hid it {spot} until the next day.", "At home {she} put it {spot}."),
        ("When {b} opened the box, {bshe} was {mood2}.", "{b} was {mood2} when {bshe} saw it.", "The next day, {b} got the gift and was {mood2}."),
        ("\"I will keep it forever,\" {bshe} said.", "\"How kind of you!\" {bshe} said.", "{b} still has it today."),
    ),
    (
        ("for whom did {a} buy a gift", "for whom {a} bought a gift", "{a} bought a gift for {b}."),
        ("how many coins did {a} have", "how many coins {a} had", "{a} had {n} coins."),
    ),
)  # fmt: skip

REPAIR: Plot = (
    (
        ("The {thing} of {a} was broken.", "{a} dropped {hers} {thing}, and it broke.", "One {time}, {a} broke {hers} {thing}."),
        ("{she} was {mood} and did not know what to do.", "\"Oh no!\" {she} cried.", "{she} sat down {at} and was {mood}."),
        ("Then {she} remembered that {b} could repair things.", "{b} heard about it and came at once.", "\"Show it to me,\" said {b}."),
        ("{b} worked {at2} for {n} hours.", "{b} took it to the {place2} and worked on it.", "{bshe} needed {n} hours and a lot of glue."),
        ("{a} held the lamp and watched.", "{a} made tea for both of them.", "In the meantime, {a} swept the floor."),
        ("Then it was as good as new.", "In the end nobody could see that it had been broken.", "It worked again, and it even looked better than before."),
        ("{a} gave {b} {n} {foods} as thanks.", "To say thank you, {a} cooked some {dish} for {b}.", "{a} thanked {b} with all {hers} heart."),
    ),
    (
        ("what was broken", "what was broken", "The {thing} of {a} was broken."),
        ("who repaired it", "who repaired it", "{b} repaired it."),
    ),
)  # fmt: skip

QUARREL: Plot = (
    (
        ("{a} and {b} both wanted the {thing}.", "{a} had a {thing}, and {b} wanted it too.", "There was only one {thing}, and both {a} and {b} wanted it."),
        ("\"It is mine!\" said {a}.", "\"I saw it first,\" said {b}.", "They pulled at it from both sides."),
        ("They shouted so loudly that the {animals} ran away.", "Soon they did not speak to each other any more.", "{a} ran to the {place} and was {mood}."),
        ("For {n} days they did not talk.", "A whole week went by.", "Without a friend, the days were long."),
        ("Then {a} had an idea.", "Then {b} wrote a letter to say sorry.", "\"I miss my friend,\" thought {a}."),
        ("\"You may have it today, and I take it tomorrow,\" {she} said.", "\"Let us share it,\" {she} said.", "They met {at} and shook hands."),
        ("Since then they have shared everything.", "That was the end of the quarrel.", "After that they never fought again."),
    ),
    (
        ("what did {a} and {b} both want", "what {a} and {b} both wanted", "They both wanted the {thing}."),
    ),
)  # fmt: skip

SNOW: Plot = (
    (
        ("When {a} woke up, everything was white.", "It had snowed all night, and {a} was excited.", "It was the first snow of the year, and {a} ran to the window."),
        ("{she} put on {hers} {colour} coat and ran out.", "{she} could not wait to go outside.", "{she} called {b}, and they went out."),
        ("Together with {b}, {she} built a big snowman {out}.", "{a} and {b} built a snowman {out}.", "They made a snowman {out}, and it was taller than {b}."),
        ("They gave it {n} buttons and an old hat.", "For the nose they took a carrot.", "Its eyes were made of {n} small stones."),
        ("Then they threw snowballs until their hands were cold.", "After that they drank hot chocolate.", "Their fingers were cold, but they did not mind."),
        ("In the {time2}, the sun came out.", "The next day was warm.", "A few days later, the snow began to melt."),
        ("Only the {colour2} hat was left.", "The snowman got smaller and smaller.", "\"Goodbye, snowman,\" said {a}."),
    ),
    (
        ("where did they build the snowman", "where they built the snowman", "They built the snowman {out}."),
        ("who built the snowman", "who built the snowman", "{a} and {b} built the snowman."),
    ),
)  # fmt: skip

HOME = (LOST, BAKING, ANIMAL, TRIP, NOISE, WORK, GIFT, REPAIR, QUARREL, SNOW)
