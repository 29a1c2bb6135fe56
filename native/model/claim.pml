/* A claim of a ring from its beginning to its end: by a trainer that maps the ring, and by one that takes over the network,
 * each alive, stopped, killed or cut off, and by whoever looks for claims whose holder is gone. One atomic access a step.
 *
 * One slot, one rank. Owner M is a mapped trainer, owner L a listener that claims for a client, one connection after the
 * other. A claim is a pin and the claim word (holder, attempts): pin, then the word from nobody to me with one more attempt;
 * finish = the word marked as ending, then the done bit, then the pin; give back = the word to nobody, then the pin. L notes a
 * finish, looks whether its connection is revoked, sets the done bit with the pin kept, decides the note, unpins.
 *
 * An owner writes that it was heard before it writes the word. The looker (a mapped claimer, or a listener: they run the
 * same code) loads the word, then looks whether its holder is silent for longer than its own lease, and takes the word back
 * if it is still the same; the pin stays until the holder asks. Of a dead owner it decides the notes, then clears the
 * word, then the pin, and may be killed in between. L ends the claims of a connection that is silent, by the same rule.
 *
 * A connection breaks at any point; a FINISH on its way may still reach L. Its client then asks: revoke, then look at the
 * note; while that is undecided the consume is in question, and is asked again. M may be stopped for good. Killed owners
 * come back once they are reclaimed.
 *
 * Defines: MAXGEN CONNECTIONS are sizes; LEASE has M and the connections ask for a lease; DISCARD allows it; MUT_* plants
 * a fault, with MUTANT. */

#ifndef MAXGEN
#define MAXGEN 2
#endif
#ifndef CONNECTIONS
#define CONNECTIONS 2
#endif
#define MAXATTEMPTS 3           /* claims counted; a rank that was claimed as often rests */

#define M 0
#define L 1
#define BIT(x) (1 << (x))

bool T1_consumed_twice;
bool T2_claimed_by_two;
bool T4_stuck;
bool T5_rewritten_under_a_claim;
bool T6_trained_on_anothers_claim;
bool T7_taken_from_a_holder_that_was_heard;
bool V1_told_no_and_consumed;
bool V2_told_yes_and_not_consumed;
bool V3_stuck;

/* the slot: not published, or READY or READING by its pins, FREE when done and unpinned */
byte gen, holder, attempts, pins;       /* holder: owner + 1 */
bool ending;                    /* of the word: its holder is about to set the done bit */
bool published, done;
#define FREE (!published || (done && pins == 0))
#define OPEN (published && !done)

/* owners */
bool dead[2], heard[2];         /* heard: not silent for longer than its lease */
bool stopped;                   /* M, for good */
bool calm;

/* the entry of each connection: its note, and of which claim */
#define NONE      0
#define UNDECIDED 1
#define ACCEPTED  2
#define REFUSED   3
byte note[CONNECTIONS], note_gen[CONNECTIONS], note_attempts[CONNECTIONS];
bool revoked[CONNECTIONS];
bool up[CONNECTIONS], sent[CONNECTIONS], quiet[CONNECTIONS];
byte answer[CONNECTIONS], con, claim_gen, claim_attempts;

/* ghosts */
bool was_silent[2];             /* since it was heard before its claim */
bool holds[2];                  /* it has a claim and believes in it */
byte by[MAXGEN + 1];            /* attempt that consumed a generation */

inline unpin(o) { pins = pins & ~BIT(o) }
inline accept(o, g, number) {
  assert(by[g] == 0 || T1_consumed_twice);
  assert((holder == o + 1 && attempts == number && gen == g) || T6_trained_on_anothers_claim);
  by[g] = number; done = true; holds[o] = false;
  printf("owner %d consumes generation %d, attempt %d\n", o, g, number)
}

proctype Writer() {
end:
  do
  :: d_step { FREE && gen < MAXGEN && !calm ->
       assert((!holds[M] && !holds[L]) || T5_rewritten_under_a_claim);
       gen++; published = true; done = false;
#ifndef MUT_PUBLISH_KEEPS_CLAIMS
       holder = 0;
#endif
       attempts = 0; printf("generation %d is published\n", gen) }
#ifdef DISCARD
  :: d_step { OPEN && !calm -> done = true; by[gen] = 15; printf("discarded\n");
#ifdef MUT_FREED_BESIDE_A_PIN
       pins = 0
#endif
       }
#endif
  od
}

/* ------------------------------------------------------------------ what both owners do */
#define RESTING  0
#define PINNED   1
#define LOSER    2
#define HOLDING  3
#define CHECKED  4
#define LEAVING  5
#define NOTED    6
#define CONSUMED 7
#define DECIDED  8
#define REVOKED  9

#define OURS(o) (holder == (o) + 1 && attempts == number && gen == ticket)
#ifdef MUT_FINISH_NOT_FENCED
#define HELD(o) true
#else
#define HELD(o) OURS(o)
#endif
#ifdef MUT_FINISH_IGNORES_DONE
#define NOT_DONE true
#else
#define NOT_DONE (!done)
#endif
#ifdef MUT_CLAIM_BY_STORE
#define NOBODYS true
#else
#define NOBODYS (holder == 0)
#endif
#ifdef MUT_CLAIMED_BEFORE_HEARD
#define HEARD_FIRST(o) skip
#define CLAIMED_NOW(o) was_silent[o] = false    /* and heard with what it does next */
#else
#define HEARD_FIRST(o) heard[o] = true; was_silent[o] = false
#define CLAIMED_NOW(o) skip
#endif

inline take_word(o) {
  assert(holder == 0 || T2_claimed_by_two);
  attempts++; number = attempts; holder = o + 1; ending = false; holds[o] = true; CLAIMED_NOW(o);
  printf("owner %d claims generation %d, attempt %d\n", o, gen, number)
}
#define FOR_WHOM(o) if :: o == L -> c = con :: else fi
#define MAY_CLAIM(o) (!dead[o] && at == RESTING && OPEN && holder == 0 && attempts < MAXATTEMPTS && !(pins & BIT(o)))
#ifdef MUT_CLAIM_BEFORE_PIN
#define CLAIM(o, may, then) \
  :: d_step { MAY_CLAIM(o) && may -> HEARD_FIRST(o); ticket = gen; take_word(o); at = PINNED; FOR_WHOM(o) } \
  :: d_step { !dead[o] && at == PINNED -> pins = pins | BIT(o); at = HOLDING; then }
#else
#define CLAIM(o, may, then) \
  :: d_step { MAY_CLAIM(o) && may -> HEARD_FIRST(o); pins = pins | BIT(o); ticket = gen; at = PINNED; FOR_WHOM(o) } \
  :: d_step { !dead[o] && at == PINNED && OPEN && NOBODYS -> take_word(o); at = HOLDING; then } \
  :: d_step { !dead[o] && at == PINNED && !(OPEN && NOBODYS) -> at = LOSER } \
  :: d_step { !dead[o] && at == LOSER -> unpin(o); at = RESTING }
#endif
#ifdef MUT_WORD_DROPPED_AFTER_THE_PIN
#define DROP(o) holds[o] = false
#define LEAVE(o) unpin(o); at = AFTER
#define AFTER 10
#define LATE_DROP(o) :: d_step { !dead[o] && at == AFTER -> if :: OURS(o) -> holder = 0 :: else fi; at = RESTING }
#else
#define DROP(o) holds[o] = false; if :: OURS(o) && !done -> holder = 0 :: else fi
#define LEAVE(o) unpin(o); at = RESTING
#define LATE_DROP(o)
#endif
#ifdef MUT_REFUSED_FINISH_KEEPS_PIN
#define REFUSE(o) holds[o] = false; at = RESTING
#else
#define REFUSE(o) DROP(o); at = LEAVING
#endif

/* ------------------------------------------------------------------ the mapped trainer */
#ifdef MUT_TAKEN_BACK_WHILE_IT_ENDS
#define MARK skip
#else
#define MARK ending = true
#endif

proctype Mapped() {
  byte at, ticket, number, c;
end:
  do
  CLAIM(M, !stopped, skip)
  :: d_step { !dead[M] && !stopped && at == HOLDING && HELD(M) -> heard[M] = true; MARK; at = CHECKED }
  :: d_step { !dead[M] && !stopped && at == HOLDING && !HELD(M) -> REFUSE(M) }
  :: d_step { !dead[M] && !stopped && at == CHECKED && NOT_DONE -> accept(M, ticket, number); at = LEAVING }
  :: d_step { !dead[M] && !stopped && at == CHECKED && !NOT_DONE -> REFUSE(M) }
  :: d_step { !dead[M] && !stopped && at == HOLDING && !calm -> DROP(M); at = LEAVING; printf("M gives back\n") }
  :: d_step { !dead[M] && !stopped && at == LEAVING -> LEAVE(M) }
  LATE_DROP(M)
#ifdef LEASE
  :: d_step { !calm && !stopped && at != RESTING -> stopped = true; printf("M is stopped\n") }
  :: d_step { heard[M] && (!calm || stopped) -> heard[M] = false; was_silent[M] = true; printf("M is silent\n") }
#endif
  :: d_step { !dead[M] && !calm -> dead[M] = true; holds[M] = false; at = RESTING; stopped = false; printf("M is killed\n") }
  od
}

/* ------------------------------------------------------------------ the listener */
#ifdef MUT_ASKED_WITHOUT_REVOKING
#define IS_REVOKED(c) false
#else
#define IS_REVOKED(c) revoked[c]
#endif
#ifdef MUT_NOT_NOTED_BEFORE
#define FIRST_NOTE(c) skip
#else
#define FIRST_NOTE(c) note[c] = UNDECIDED; note_gen[c] = ticket; note_attempts[c] = number
#endif
#ifdef MUT_UNPINNED_BEFORE_DECIDED
#define AND_UNPIN unpin(L)
#else
#define AND_UNPIN skip
#endif
inline refuse_noted(c) { note[c] = REFUSED; note_gen[c] = ticket; note_attempts[c] = number; answer[c] = REFUSED; REFUSE(L) }

#define TOLD if :: up[c] && c == con && claim_gen == 0 -> claim_gen = gen; claim_attempts = number; quiet[c] = false :: else fi

proctype Listener() {
  byte at, c, ticket, number;
end:
  do
  CLAIM(L, (up[con] && claim_gen == 0 && !calm), TOLD)
#ifdef MUT_LOOKS_BEFORE_IT_NOTES
  :: d_step { !dead[L] && at == HOLDING && sent[c] && !revoked[c] -> sent[c] = false; at = NOTED }
  :: d_step { !dead[L] && at == NOTED -> FIRST_NOTE(c); at = CHECKED }
#else
  :: d_step { !dead[L] && at == HOLDING && sent[c] -> sent[c] = false; FIRST_NOTE(c); at = NOTED }
  :: d_step { !dead[L] && at == NOTED -> if :: IS_REVOKED(c) -> at = REVOKED :: else -> at = CHECKED fi }
#endif
  :: d_step { !dead[L] && at == CHECKED && HELD(L) && NOT_DONE -> accept(L, ticket, number); AND_UNPIN; at = CONSUMED }
  :: d_step { !dead[L] && at == CHECKED && !(HELD(L) && NOT_DONE) -> refuse_noted(c) }
  :: d_step { !dead[L] && at == CONSUMED -> note[c] = ACCEPTED; note_gen[c] = ticket; note_attempts[c] = number; at = DECIDED }
  :: d_step { !dead[L] && at == DECIDED -> unpin(L); answer[c] = ACCEPTED; at = RESTING }
  :: d_step { !dead[L] && at == REVOKED -> refuse_noted(c) }
  :: d_step { !dead[L] && at == HOLDING && (!up[c] || quiet[c]) -> DROP(L); answer[c] = REFUSED; sent[c] = false; at = LEAVING;
       printf("L ends the claim of connection %d\n", c) }
  :: d_step { !dead[L] && at == LEAVING -> LEAVE(L) }
  :: d_step { !dead[L] && sent[con] && (at == RESTING || c != con) -> sent[con] = false; answer[con] = REFUSED }  /* it ended */
  LATE_DROP(L)
  :: d_step { !dead[L] && !calm -> dead[L] = true; holds[L] = false; at = RESTING; up[c] = false; up[con] = false; sent[c] = false;
       printf("L is killed\n") }
  od
}

/* ------------------------------------------------------------------ the looker */
#define CONSUMED_BY_IT(k) ((pins & BIT(L)) && done && gen == note_gen[k] && holder == L + 1 && attempts == note_attempts[k])
inline decide(k) {
  if
  :: note[k] == UNDECIDED && CONSUMED_BY_IT(k) -> note[k] = ACCEPTED
  :: note[k] == UNDECIDED && !CONSUMED_BY_IT(k) -> note[k] = REFUSED
  :: else -> skip
  fi
}
inline decide_all(x) {         /* of the dead owner's connections */
  if
  :: x == L ->
     decide(0);
#if CONNECTIONS > 1
     decide(1)
#endif
  :: else -> skip
  fi
}
#ifdef MUT_RECLAIM_FORGETS_CLAIMS
#define CLEAR_WORD(x) skip
#else
#define CLEAR_WORD(x) if :: (pins & BIT(x)) && holder == (x) + 1 && !done -> holder = 0 :: else fi
#endif
#if defined(MUT_CLEARED_BEFORE_DECIDED)
#define FIRST_STEP(x) CLEAR_WORD(x); unpin(x)
#define SECOND_STEP(x) skip
#define THIRD_STEP(x) decide_all(x)
#elif defined(MUT_RECLAIM_CLEARS_THE_BIT_FIRST)
#define FIRST_STEP(x) decide_all(x)
#define SECOND_STEP(x) unpin(x)
#define THIRD_STEP(x) CLEAR_WORD(x)
#else
#define FIRST_STEP(x) decide_all(x)
#define SECOND_STEP(x) CLEAR_WORD(x)
#define THIRD_STEP(x) unpin(x)
#endif
#define RECLAIM(x) \
  :: d_step { dead[x] && step == 0 -> FIRST_STEP(x); step = 1; who = x } \
  :: d_step { dead[x] && step == 1 && who == x -> SECOND_STEP(x); step = 2 } \
  :: d_step { dead[x] && step == 2 && who == x -> THIRD_STEP(x); step = 3 } \
  :: d_step { dead[x] && step == 3 && who == x -> dead[x] = false; heard[x] = true; step = 0; who = 0; printf("owner %d is up again\n", x) }

proctype Looker() {
  byte step, who, seen, seen_attempts, seen_gen;
  bool silent;
end:
  do
  RECLAIM(M)
  RECLAIM(L)
  :: d_step { step > 0 && !calm -> step = 0; who = 0; printf("the looker is killed\n") }
#if defined(LEASE) && !defined(MUT_NOBODY_LOOKS)
#ifdef MUT_SILENCE_BEFORE_THE_WORD
  :: d_step { seen == 0 && !silent && !heard[M] && !dead[M] -> silent = true }
  :: d_step { silent && seen == 0 -> silent = false; if :: OPEN && holder == M + 1 -> seen = holder; seen_attempts = attempts; seen_gen = gen :: else fi }
#define TAKEN_BACK seen != 0
#elif defined(MUT_LOOKERS_LEASE)
  :: d_step { seen == 0 && OPEN && !ending && holder == M + 1 && !dead[M] -> seen = holder; seen_attempts = attempts; seen_gen = gen }
#define TAKEN_BACK seen != 0
#else
  :: d_step { seen == 0 && OPEN && !ending && holder == M + 1 && !heard[M] && !dead[M] -> seen = holder; seen_attempts = attempts; seen_gen = gen }
  :: d_step { seen != 0 && !silent && heard[M] -> seen = 0; seen_attempts = 0; seen_gen = 0 }
  :: d_step { seen != 0 && !silent && !heard[M] -> silent = true }
#define TAKEN_BACK seen != 0 && silent
#endif
  :: d_step { TAKEN_BACK ->
       if
       :: OPEN && !ending && holder == seen && attempts == seen_attempts && gen == seen_gen ->
          assert(was_silent[M] || dead[M] || T7_taken_from_a_holder_that_was_heard);
          holder = 0; holds[M] = false; printf("the looker takes M's claim back\n")
       :: else -> skip
       fi;
       seen = 0; seen_attempts = 0; seen_gen = 0; silent = false }
#endif
  od
}

/* ------------------------------------------------------------------ the client */
#define IDLE   0
#define ASKED  1
#define BROKEN 2
#define ASKING 3

inline tell(what) {
  assert(what != REFUSED || by[claim_gen] != claim_attempts || V1_told_no_and_consumed);
#ifndef DISCARD                 /* a limit: what is discarded between the note of a listener that dies and its done bit is told so */
  assert(what != ACCEPTED || by[claim_gen] == claim_attempts || V2_told_yes_and_not_consumed);
#endif
  claim_gen = 0; claim_attempts = 0
}
#ifdef MUT_IN_QUESTION_IS_NO
#define STILL_UNDECIDED false
#else
#define STILL_UNDECIDED (note[con] == UNDECIDED && note_gen[con] == claim_gen && note_attempts[con] == claim_attempts)
#endif

proctype Client() {
  byte is = IDLE;
end:
  do
  :: d_step { is == IDLE && claim_gen != 0 && up[con] -> sent[con] = true; is = ASKED }
  :: d_step { is == IDLE && claim_gen != 0 && !up[con] -> tell(REFUSED); is = BROKEN }  /* never asked */
  :: d_step { is == IDLE && claim_gen != 0 && answer[con] != NONE -> tell(answer[con]); answer[con] = NONE }  /* it was silent */
  :: d_step { is == IDLE && claim_gen == 0 && !up[con] && con + 1 < CONNECTIONS -> is = BROKEN }
  :: d_step { is == ASKED && answer[con] != NONE && up[con] -> tell(answer[con]); answer[con] = NONE; sent[con] = false; is = IDLE }
#ifdef MUT_LOST_ANSWER_IS_NO
  :: d_step { is == ASKED && !up[con] -> tell(REFUSED); is = BROKEN }
#else
  :: d_step { is == ASKED && !up[con] -> revoked[con] = true; is = ASKING }
#endif
  :: d_step { is == ASKING && !STILL_UNDECIDED ->
       if
       :: note[con] == ACCEPTED && note_gen[con] == claim_gen && note_attempts[con] == claim_attempts -> tell(ACCEPTED)
       :: else -> tell(REFUSED)
       fi;
       is = BROKEN }
  :: d_step { is == BROKEN && con + 1 < CONNECTIONS -> con++; up[con] = true; is = IDLE }
  :: d_step { up[con] && !calm -> up[con] = false; printf("connection %d breaks\n", con) }
#ifdef LEASE
  :: d_step { up[con] && !calm && claim_gen != 0 && !quiet[con] -> quiet[con] = true; printf("connection %d is silent\n", con) }
#endif
  od
}

init {
  atomic { up[0] = true; heard[M] = true; heard[L] = true;
    run Writer(); run Mapped(); run Listener(); run Looker(); run Client() }
  d_step { calm = true; printf("nothing fails from here on\n") }
  timeout;
  assert(claim_gen == 0 || V3_stuck);
  /* Consumed, or claimed as often as is counted here; the pin of a process that is stopped for good stays. */
  assert(done || !published || attempts >= MAXATTEMPTS || (stopped && (holder == 0 || ending)) || T4_stuck);
  assert(!(pins & BIT(L)) || T4_stuck);
  assert(!(pins & BIT(M)) || stopped || T4_stuck);
  assert(holder != M + 1 || done || !stopped || ending || T4_stuck)
}
