/* A claim of a ring from its beginning to its end: by a trainer that maps the ring, and by one that takes over the network,
 * each alive, stopped, killed or cut off, and by whoever looks for claims whose holder is gone. One atomic access a step.
 *
 * One slot. Owner M is a mapped trainer, owner L a listener that claims for a client, one connection after the
 * other. A claim is a pin and the claim word of its rank (holder, attempts): pin, then the word from nobody to me with one
 * more attempt; finish = the word marked as ending, then the done bit, then the pin; give back = the word to nobody, then
 * the pin. L notes a finish, looks whether its connection is revoked, sets the done bit with the pin kept, decides the note,
 * unpins. With two ranks M claims both, by two workers that share M's one pin, and L claims the second.
 *
 * An owner writes that it was heard before it writes the word. The looker (a mapped claimer, or a listener: they run the
 * same code) loads the word, then looks whether its holder is silent for longer than its own lease, and takes the word back
 * if it is still the same; the pin stays until the holder asks. Of a dead owner it decides the notes, then clears the
 * word, then the pin, and may be killed in between. L ends the claims of a connection that is silent, by the same rule.
 *
 * A connection breaks at any point; a FINISH on its way may still reach L. Its client then asks: revoke, then look at the
 * note; while that is undecided the consume is in question, and is asked again. Where nothing is left, L asks a client to
 * come again: the entry of its connection is lost, and what it still asks for over the same one goes into a second entry,
 * while a writer that takes the ring over may publish anew. M may be stopped for good. Killed owners
 * come back once they are reclaimed. What nobody reads any more is set to zero, so that it makes no further states: so the
 * entry of a connection is that of the present one, whose client asks.
 *
 * Defines: RANKS (1 or 2) MAXGEN CONNECTIONS MAXATTEMPTS are sizes; NO_MAPPED and NO_NETWORK leave out one trainer; LEASE
 * has M and the connections ask for a lease; DISCARD allows it; ENDS has M end deliveries that it finds too old; AGAIN
 * has L ask clients to come again; MUT_* plants a fault, with MUTANT. */

#ifndef RANKS
#define RANKS 1
#endif
#ifndef MAXGEN
#define MAXGEN 1
#endif
#ifndef CONNECTIONS
#define CONNECTIONS 2
#endif
#ifndef MAXATTEMPTS
#define MAXATTEMPTS 2           /* claims counted; a rank that was claimed as often rests */
#endif

#define M 0                     /* owners, and their workers: M's of rank 0, and L's */
#define L 1
#define M2 2                    /* M's worker of rank 1 */
#define RL (RANKS - 1)          /* L's rank */
#define BIT(x) (1 << (x))
#define ALL (BIT(RANKS) - 1)

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
bool published;
byte gen, pins, done;                   /* a bit for each owner, for each rank */
byte holder[RANKS], attempts[RANKS];    /* holder: owner + 1 */
bool ending[RANKS];                     /* of the word: its holder is about to set the done bit */
#define FREE (!published || (done == ALL && pins == 0))
#define OPEN(r) (published && !(done & BIT(r)))

/* owners */
bool dead[2];
bool heard;                     /* M: not silent for longer than its lease */
bool stopped;                   /* M, for good */
byte mine[2];                   /* pins, counted: the bit goes with the last */
bool calm;

/* workers */
byte at[3], ticket[3], number[3];
byte con_of;                    /* for which connection L claims */

/* the present connection, and of its entry the last note; what may still come over an earlier one */
#define NONE      0
#define UNDECIDED 1
#define ACCEPTED  2
#define REFUSED   3
byte con, note, note_gen, note_attempts, answer, claim_gen, claim_attempts;
bool up, quiet, sent[CONNECTIONS], revoked[CONNECTIONS];
bool lost;                      /* the present connection has an entry that is lost, before the one with its notes */
#define UP(c) (up && c == con)

/* ghosts */
bool was_silent[RANKS];         /* M, since it was heard before this claim */
bool holds[3];                  /* it has a claim and believes in it */
bool told_no;                   /* the client, of the claim that L has */
byte by[(MAXGEN + 1) * RANKS];  /* attempt that consumed a generation */
#define BY(g, r) by[(g) * RANKS + (r)]

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
#define ENDING   11             /* M has the word, to end the delivery */
#define DISCARDED 15            /* in `by`: nobody trains on it any more */

inline pin(o) { mine[o]++; pins = pins | BIT(o) }
inline unpin(o) { mine[o]--; if :: mine[o] == 0 -> pins = pins & ~BIT(o) :: else fi }
inline rest(w) { at[w] = RESTING; ticket[w] = 0; number[w] = 0 }
inline forget() { if :: con_of != con -> sent[con_of] = false; revoked[con_of] = false :: else fi; con_of = 0; told_no = false }
inline to_nobody(r) { holder[r] = 0; ending[r] = false }
inline accept(o, w, r) {
  assert(BY(ticket[w], r) == 0 || T1_consumed_twice);
  assert((holder[r] == o + 1 && attempts[r] == number[w] && gen == ticket[w]) || T6_trained_on_anothers_claim);
  assert(o != L || !told_no || V1_told_no_and_consumed);
  BY(ticket[w], r) = number[w]; done = done | BIT(r); holds[w] = false;
  printf("owner %d consumes generation %d for rank %d, attempt %d\n", o, ticket[w], r, number[w])
}
inline discarded(r) { if :: !(done & BIT(r)) -> BY(gen, r) = DISCARDED :: else fi }

proctype Writer() {
end:
  do
  :: d_step { FREE && gen < MAXGEN && !calm ->
       assert((!holds[M] && !holds[L] && !holds[M2]) || T5_rewritten_under_a_claim);
       gen++; published = true; done = 0; attempts[0] = 0;
#ifndef MUT_PUBLISH_KEEPS_CLAIMS
       to_nobody(0);
#endif
#if RANKS > 1
       attempts[1] = 0;
#ifndef MUT_PUBLISH_KEEPS_CLAIMS
       to_nobody(1);
#endif
#endif
       printf("generation %d is published\n", gen) }
#ifdef DISCARD
  :: d_step { published && done != ALL && !calm ->
       discarded(0);
#if RANKS > 1
       discarded(1);
#endif
       done = ALL; printf("discarded\n");
#ifdef MUT_FREED_BESIDE_A_PIN
       pins = 0; mine[M] = 0; mine[L] = 0
#endif
       }
#endif
  od
}

/* ------------------------------------------------------------------ what both owners do */
#define OURS(o, w, r) (holder[r] == (o) + 1 && attempts[r] == number[w] && gen == ticket[w])
#ifdef MUT_FINISH_NOT_FENCED
#define HELD(o, w, r) true
#else
#define HELD(o, w, r) OURS(o, w, r)
#endif
#ifdef MUT_FINISH_IGNORES_DONE
#define NOT_DONE(r) true
#else
#define NOT_DONE(r) (!(done & BIT(r)))
#endif
#ifdef MUT_CLAIM_BY_STORE
#define NOBODYS(r) true
#else
#define NOBODYS(r) (holder[r] == 0)
#endif
#define HEARD_NOW(o, r) if :: o == M -> heard = true; was_silent[r] = false :: else fi
#ifdef MUT_CLAIMED_BEFORE_HEARD
#define HEARD_FIRST(o, r) skip
#define CLAIMED_NOW(o, r) if :: o == M -> was_silent[r] = false :: else fi    /* and heard with what it does next */
#else
#define HEARD_FIRST(o, r) HEARD_NOW(o, r)
#define CLAIMED_NOW(o, r) skip
#endif

inline take_word(o, w, r) {
  assert(holder[r] == 0 || T2_claimed_by_two);
  attempts[r]++; number[w] = attempts[r]; holder[r] = o + 1; ending[r] = false; holds[w] = true; CLAIMED_NOW(o, r);
  printf("owner %d claims generation %d for rank %d, attempt %d\n", o, gen, r, number[w])
}
#define FOR_WHOM(o) if :: o == L -> con_of = con :: else fi
#define MAY_CLAIM(o, w, r) (!dead[o] && at[w] == RESTING && OPEN(r) && holder[r] == 0 && attempts[r] < MAXATTEMPTS)
#ifdef MUT_CLAIM_BEFORE_PIN
#define CLAIM(o, w, r, may, then) \
  :: d_step { MAY_CLAIM(o, w, r) && may -> HEARD_FIRST(o, r); ticket[w] = gen; take_word(o, w, r); at[w] = PINNED; FOR_WHOM(o) } \
  :: d_step { !dead[o] && at[w] == PINNED -> pin(o); at[w] = HOLDING; then }
#else
#define CLAIM(o, w, r, may, then) \
  :: d_step { MAY_CLAIM(o, w, r) && may -> HEARD_FIRST(o, r); pin(o); ticket[w] = gen; at[w] = PINNED; FOR_WHOM(o) } \
  :: d_step { !dead[o] && at[w] == PINNED && OPEN(r) && NOBODYS(r) -> take_word(o, w, r); at[w] = HOLDING; then } \
  :: d_step { !dead[o] && at[w] == PINNED && !(OPEN(r) && NOBODYS(r)) -> at[w] = LOSER } \
  :: d_step { !dead[o] && at[w] == LOSER -> unpin(o); FORGET(o); rest(w) }
#endif
#define FORGET(o) if :: o == L -> forget() :: else fi
#ifdef MUT_WORD_DROPPED_AFTER_THE_PIN
#define DROP(o, w, r) holds[w] = false
#define LEAVE(o, w) unpin(o); at[w] = AFTER
#define AFTER 10
#define LATE_DROP(o, w, r) \
  :: d_step { !dead[o] && at[w] == AFTER -> if :: OURS(o, w, r) -> to_nobody(r) :: else fi; FORGET(o); rest(w) }
#else
#define DROP(o, w, r) holds[w] = false; if :: OURS(o, w, r) && !(done & BIT(r)) -> to_nobody(r) :: else fi
#define LEAVE(o, w) unpin(o); FORGET(o); rest(w)
#define LATE_DROP(o, w, r)
#endif
#ifdef MUT_REFUSED_FINISH_KEEPS_PIN
#define REFUSE(o, w, r) holds[w] = false; FORGET(o); rest(w)
#else
#define REFUSE(o, w, r) DROP(o, w, r); at[w] = LEAVING
#endif

/* ------------------------------------------------------------------ the mapped trainer */
#ifdef MUT_TAKEN_BACK_WHILE_IT_ENDS
#define MARK(r) skip
#else
#define MARK(r) ending[r] = true
#endif
#define RUNS (!dead[M] && !stopped)
#ifdef MUT_ENDED_WITHOUT_THE_MARK
#define END_MARK false
#else
#define END_MARK true
#endif

proctype Mapped(byte w; byte r) {
end:
  do
  CLAIM(M, w, r, !stopped, skip)
#ifdef ENDS
  :: d_step { RUNS && at[w] == PINNED && OPEN(r) && holder[r] == 0 && !calm ->
       number[w] = attempts[r]; holder[r] = M + 1; ending[r] = END_MARK; at[w] = ENDING }
  :: d_step { RUNS && at[w] == ENDING && NOT_DONE(r) ->
       assert((OURS(M, w, r) && BY(ticket[w], r) == 0) || T6_trained_on_anothers_claim);
       BY(ticket[w], r) = DISCARDED; done = done | BIT(r); at[w] = LEAVING; printf("M ends generation %d\n", ticket[w]) }
  :: d_step { RUNS && at[w] == ENDING && !NOT_DONE(r) -> REFUSE(M, w, r) }
#endif
  :: d_step { RUNS && at[w] == HOLDING && HELD(M, w, r) -> heard = true; MARK(r); at[w] = CHECKED }
  :: d_step { RUNS && at[w] == HOLDING && !HELD(M, w, r) -> REFUSE(M, w, r) }
  :: d_step { RUNS && at[w] == CHECKED && NOT_DONE(r) -> accept(M, w, r); at[w] = LEAVING }
  :: d_step { RUNS && at[w] == CHECKED && !NOT_DONE(r) -> REFUSE(M, w, r) }
  :: d_step { RUNS && at[w] == HOLDING && !calm -> DROP(M, w, r); at[w] = LEAVING; printf("M gives back\n") }
  :: d_step { RUNS && at[w] == LEAVING -> LEAVE(M, w) }
  LATE_DROP(M, w, r)
#ifdef LEASE
  :: d_step { RUNS && !calm && at[w] != RESTING -> stopped = true; printf("M is stopped\n") }
  :: d_step { w == M && heard && (!calm || stopped) -> heard = false; was_silent[0] = true; was_silent[RL] = true; printf("M is silent\n") }
#endif
  :: d_step { w == M && !dead[M] && !calm -> dead[M] = true; holds[M] = false; holds[M2] = false; rest(M); rest(M2); mine[M] = 0;
       stopped = false; printf("M is killed\n") }
  od
}

/* ------------------------------------------------------------------ the listener */
#ifdef MUT_ASKED_WITHOUT_REVOKING
#define IS_REVOKED(c) false
#else
#define IS_REVOKED(c) revoked[c]
#endif
#define NOTE(what) if :: con_of == con -> note = what; note_gen = ticket[L]; note_attempts = number[L] :: else fi
#ifdef MUT_NOT_NOTED_BEFORE
#define FIRST_NOTE skip
#elif defined(MUT_ACCEPTED_BEFORE_IT_IS_CONSUMED)
#define FIRST_NOTE NOTE(ACCEPTED)
#else
#define FIRST_NOTE NOTE(UNDECIDED)
#endif
#ifdef MUT_UNPINNED_BEFORE_DECIDED
#define AND_UNPIN unpin(L)
#define LAST_UNPIN skip
#else
#define AND_UNPIN skip
#define LAST_UNPIN unpin(L)
#endif
#define ANSWER(what) if :: con_of == con -> answer = what :: else fi
inline refuse_noted() { NOTE(REFUSED); ANSWER(REFUSED); REFUSE(L, L, RL) }

#define TOLD if :: UP(con_of) && claim_gen == 0 -> claim_gen = gen; claim_attempts = number[L]; quiet = false :: else fi

proctype Listener() {
end:
  do
  CLAIM(L, L, RL, (up && claim_gen == 0 && !calm), TOLD)
#ifdef MUT_LOOKS_BEFORE_IT_NOTES
  :: d_step { !dead[L] && at[L] == HOLDING && sent[con_of] && !revoked[con_of] -> sent[con_of] = false; at[L] = NOTED }
  :: d_step { !dead[L] && at[L] == NOTED -> FIRST_NOTE; at[L] = CHECKED }
#else
  :: d_step { !dead[L] && at[L] == HOLDING && sent[con_of] -> sent[con_of] = false; FIRST_NOTE; at[L] = NOTED }
  :: d_step { !dead[L] && at[L] == NOTED -> if :: IS_REVOKED(con_of) -> at[L] = REVOKED :: else -> at[L] = CHECKED fi }
#endif
  :: d_step { !dead[L] && at[L] == CHECKED && HELD(L, L, RL) && NOT_DONE(RL) -> accept(L, L, RL); AND_UNPIN; at[L] = CONSUMED }
  :: d_step { !dead[L] && at[L] == CHECKED && !(HELD(L, L, RL) && NOT_DONE(RL)) -> refuse_noted() }
  :: d_step { !dead[L] && at[L] == CONSUMED -> NOTE(ACCEPTED); at[L] = DECIDED }
  :: d_step { !dead[L] && at[L] == DECIDED -> LAST_UNPIN; ANSWER(ACCEPTED); forget(); rest(L) }
  :: d_step { !dead[L] && at[L] == REVOKED -> refuse_noted() }
  :: d_step { !dead[L] && at[L] == HOLDING && (!UP(con_of) || quiet) -> DROP(L, L, RL); ANSWER(REFUSED); sent[con_of] = false;
       at[L] = LEAVING; printf("L ends the claim of connection %d\n", con_of) }
  :: d_step { !dead[L] && at[L] == LEAVING -> LEAVE(L, L) }
#ifdef AGAIN
  :: d_step { !dead[L] && !calm && at[L] == RESTING && FREE && up && !lost -> lost = true; printf("connection %d is to come again\n", con) }
#endif
  :: d_step { !dead[L] && sent[con] && (at[L] == RESTING || con_of != con) -> sent[con] = false; answer = REFUSED }  /* it ended */
  LATE_DROP(L, L, RL)
  :: d_step { !dead[L] && !calm -> dead[L] = true; holds[L] = false; up = false; sent[con_of] = false; sent[con] = false;
       forget(); rest(L); mine[L] = 0; printf("L is killed\n") }
  od
}

/* ------------------------------------------------------------------ the looker */
#define CONSUMED_BY_IT \
  ((pins & BIT(L)) && (done & BIT(RL)) && gen == note_gen && holder[RL] == L + 1 && attempts[RL] == note_attempts)
inline decide_all(x) {         /* of the dead owner's connections */
  if
  :: x == L && note == UNDECIDED -> if :: CONSUMED_BY_IT -> note = ACCEPTED :: else -> note = REFUSED fi
  :: else
  fi
}
#ifdef MUT_RECLAIM_FORGETS_CLAIMS
#define CLEAR(x, r) skip
#else
#define CLEAR(x, r) if :: (pins & BIT(x)) && holder[r] == (x) + 1 && !(done & BIT(r)) -> to_nobody(r) :: else fi
#endif
#if RANKS > 1
#define CLEAR_WORD(x) CLEAR(x, 0); CLEAR(x, 1)
#else
#define CLEAR_WORD(x) CLEAR(x, 0)
#endif
#define CLEAR_PIN(x) pins = pins & ~BIT(x)
#if defined(MUT_CLEARED_BEFORE_DECIDED)
#define FIRST_STEP(x) CLEAR_WORD(x); CLEAR_PIN(x)
#define SECOND_STEP(x) skip
#define THIRD_STEP(x) decide_all(x)
#elif defined(MUT_RECLAIM_CLEARS_THE_BIT_FIRST)
#define FIRST_STEP(x) decide_all(x)
#define SECOND_STEP(x) CLEAR_PIN(x)
#define THIRD_STEP(x) CLEAR_WORD(x)
#else
#define FIRST_STEP(x) decide_all(x)
#define SECOND_STEP(x) CLEAR_WORD(x)
#define THIRD_STEP(x) CLEAR_PIN(x)
#endif
#define RECLAIM(x) \
  :: d_step { dead[x] && step == 0 -> FIRST_STEP(x); step = 1; who = x } \
  :: d_step { dead[x] && step == 1 && who == x -> SECOND_STEP(x); step = 2 } \
  :: d_step { dead[x] && step == 2 && who == x -> THIRD_STEP(x); step = 3 } \
  :: d_step { dead[x] && step == 3 && who == x -> dead[x] = false; step = 0; who = 0; printf("owner %d is up again\n", x); \
       if :: x == M -> heard = true :: else fi }

inline look_at(r) { seen = true; seen_rank = r; seen_attempts = attempts[r]; seen_gen = gen }
inline looked() { seen = false; silent = false; seen_rank = 0; seen_attempts = 0; seen_gen = 0 }
#define OF_M(r) (OPEN(r) && !ending[r] && holder[r] == M + 1 && !dead[M])
#ifdef MUT_LOOKERS_LEASE
#define LOOK(r) :: d_step { !seen && OF_M(r) -> look_at(r) }
#elif defined(MUT_SILENCE_BEFORE_THE_WORD)
#define LOOK(r) :: d_step { silent && !seen -> silent = false; if :: OPEN(r) && holder[r] == M + 1 -> look_at(r) :: else fi }
#else
#define LOOK(r) :: d_step { !seen && !heard && OF_M(r) -> look_at(r) }
#endif

proctype Looker() {
  byte step, who, seen_rank, seen_attempts, seen_gen;
  bool seen, silent;
end:
  do
#ifndef NO_MAPPED
  RECLAIM(M)
#endif
#ifndef NO_NETWORK
  RECLAIM(L)
#endif
  :: d_step { step > 0 && !calm -> step = 0; who = 0; printf("the looker is killed\n") }
#if defined(LEASE) && !defined(MUT_NOBODY_LOOKS)
  LOOK(0)
#if RANKS > 1
  LOOK(1)
#endif
#ifdef MUT_SILENCE_BEFORE_THE_WORD
  :: d_step { !seen && !silent && !heard && !dead[M] -> silent = true }
#define TAKEN_BACK seen
#elif defined(MUT_LOOKERS_LEASE)
#define TAKEN_BACK seen
#else
  :: d_step { seen && !silent && heard -> looked() }
  :: d_step { seen && !silent && !heard -> silent = true }
#define TAKEN_BACK (seen && silent)
#endif
  :: d_step { TAKEN_BACK ->
       if
       :: OPEN(seen_rank) && !ending[seen_rank] && holder[seen_rank] == M + 1 && attempts[seen_rank] == seen_attempts && gen == seen_gen ->
          assert(was_silent[seen_rank] || dead[M] || T7_taken_from_a_holder_that_was_heard);
          to_nobody(seen_rank);
          if :: seen_rank == 0 -> holds[M] = false :: else -> holds[M2] = false fi;
          printf("the looker takes M's claim back\n")
       :: else -> skip
       fi;
       looked() }
#endif
  od
}

/* ------------------------------------------------------------------ the client */
#define IDLE   0
#define ASKED  1
#define BROKEN 2
#define ASKING 3

inline tell(what) {
  assert(what != REFUSED || BY(claim_gen, RL) != claim_attempts || V1_told_no_and_consumed);
  /* discarded: between the note of a listener that then dies and its done bit; nobody else has the payload */
  assert(what != ACCEPTED || BY(claim_gen, RL) == claim_attempts || BY(claim_gen, RL) == DISCARDED || V2_told_yes_and_not_consumed);
  told_no = (what == REFUSED && at[L] != RESTING && ticket[L] == claim_gen && number[L] == claim_attempts);
  claim_gen = 0; claim_attempts = 0; answer = NONE; quiet = false
}
#ifdef MUT_ASKS_THE_FIRST_ENTRY
#define NOTED_FOR_IT (!lost && note_gen == claim_gen && note_attempts == claim_attempts)
#else
#define NOTED_FOR_IT (note_gen == claim_gen && note_attempts == claim_attempts)
#endif
#ifdef MUT_IN_QUESTION_IS_NO
#define STILL_UNDECIDED false
#else
#define STILL_UNDECIDED (note == UNDECIDED && NOTED_FOR_IT)
#endif

proctype Client() {
  byte is = IDLE;
end:
  do
  :: d_step { is == IDLE && claim_gen != 0 && up -> sent[con] = true; is = ASKED }
  :: d_step { is == IDLE && claim_gen != 0 && !up -> tell(REFUSED); is = BROKEN }  /* never asked */
  :: d_step { is == IDLE && claim_gen != 0 && answer != NONE -> tell(answer) }  /* it was silent */
  :: d_step { is == IDLE && claim_gen == 0 && !up && con + 1 < CONNECTIONS -> is = BROKEN }
  :: d_step { is == ASKED && answer != NONE && up -> tell(answer); sent[con] = false; is = IDLE }
#ifdef MUT_LOST_ANSWER_IS_NO
  :: d_step { is == ASKED && !up -> tell(REFUSED); is = BROKEN }
#else
  :: d_step { is == ASKED && !up -> revoked[con] = true; is = ASKING }
#endif
  :: d_step { is == ASKING && !STILL_UNDECIDED ->
       if
       :: note == ACCEPTED && NOTED_FOR_IT -> tell(ACCEPTED)
       :: else -> tell(REFUSED)
       fi;
       is = BROKEN }
  :: d_step { is == BROKEN && con + 1 < CONNECTIONS ->
       if :: at[L] == RESTING || con_of != con -> sent[con] = false; revoked[con] = false :: else fi;
       note = NONE; note_gen = 0; note_attempts = 0; answer = NONE; quiet = false; lost = false;
       con++; up = true; is = IDLE }
  :: d_step { up && !calm -> up = false; printf("connection %d breaks\n", con) }
#ifdef LEASE
  :: d_step { up && !calm && claim_gen != 0 && !quiet -> quiet = true; printf("connection %d is silent\n", con) }
#endif
  od
}

/* Consumed, or claimed as often as is counted here; the pin of a process that is stopped for good stays. */
inline at_rest(r) {
#ifndef NO_MAPPED               /* a client without a connection claims no more */
  assert((done & BIT(r)) || !published || attempts[r] >= MAXATTEMPTS || (stopped && (holder[r] == 0 || ending[r])) || T4_stuck);
#endif
  assert((done & BIT(r)) || holder[r] == 0 || (stopped && ending[r]) || T4_stuck);
}

init {
  atomic { heard = true;
    run Writer(); run Looker();
#ifndef NO_MAPPED
    run Mapped(M, 0);
#if RANKS > 1
    run Mapped(M2, 1);
#endif
#endif
#ifndef NO_NETWORK
    up = true; run Listener(); run Client()
#endif
  }
  d_step { calm = true; printf("nothing fails from here on\n") }
  timeout;
  assert(claim_gen == 0 || V3_stuck);
  at_rest(0);
#if RANKS > 1
  at_rest(1);
#endif
  assert(!(pins & BIT(L)) || T4_stuck);
  assert(!(pins & BIT(M)) || stopped || T4_stuck)
}
