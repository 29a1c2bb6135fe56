/* FINISH over a connection that breaks: who is told what became of it (native/ring/finishes.hpp), one atomic access a step.
 *
 * One slot, one rank. Listener X claims for a client, one connection after the other, and finishes what the client asks
 * it to: a note, a look whether the connection is revoked, the done bit with the pin kept, the note decided, the pin.
 * It is killed between any two steps; whoever has proven it dead decides its notes before it clears its pin, and may be
 * killed in between. A connection breaks at any point; a FINISH on its way may still reach X. The client then asks:
 * revoke, then look at the note; while it is undecided, again. Another consumer takes what is given back, and the writer
 * uses the slot anew as soon as it is free.
 *
 * Defines: MAXGEN CONNECTIONS are sizes; MUT_* plants a fault, with MUTANT. */

#ifndef MAXGEN
#define MAXGEN 3
#endif
#ifndef CONNECTIONS
#define CONNECTIONS 2
#endif

/* the slot */
byte gen, holder, attempts;     /* holder: 0 nobody, 1 listener X, 2 the other consumer */
bool published, done, pin;      /* the pin is X's */

/* the entry of each connection: its note, and of which claim */
#define NONE      0
#define UNDECIDED 1
#define ACCEPTED  2
#define REFUSED   3
byte note[CONNECTIONS], note_gen[CONNECTIONS], note_attempts[CONNECTIONS];
bool revoked[CONNECTIONS];

/* the connections */
bool up[CONNECTIONS], sent[CONNECTIONS];
byte answer[CONNECTIONS];
byte con;                       /* the one in use */
byte claim_gen, claim_attempts; /* what the client has */

/* ghosts: the attempt that consumed a generation, and what the client was told of each of its claims */
#define OTHER 9
#define CLAIM(g, a) ((g) * 4 + (a))
byte by[MAXGEN + 1], told[4 * MAXGEN + 4];

#define UP       0
#define DEAD     1
byte life = UP;
bool clearing, calm;

bool V1_told_no_and_consumed;
bool V2_told_yes_and_not_consumed;
bool V3_stuck;

#define FREE (!published || (done && !pin))

inline tell(what) {
  assert(what != REFUSED || by[claim_gen] != claim_attempts || V1_told_no_and_consumed);
  assert(what != ACCEPTED || by[claim_gen] == claim_attempts || V2_told_yes_and_not_consumed);
  told[CLAIM(claim_gen, claim_attempts)] = what
}

proctype Writer() {
end:
  do
  :: d_step { FREE && gen < MAXGEN && !calm -> gen++; published = true; done = false; holder = 0; attempts = 0 }
  od
}

proctype Other() {
end:
  do
  :: d_step { published && !done && holder == 0 && attempts < 3 ->
       attempts++; done = true; by[gen] = OTHER; printf("another consumes generation %d\n", gen) }
  od
}

/* ------------------------------------------------------------------ the listener */
#define RESTING  0
#define HOLDING  1
#define NOTED    2
#define CHECKED  3
#define CONSUMED 4
#define DECIDED  5
#define REVOKED  6

#ifdef MUT_ASKED_WITHOUT_REVOKING
#define IS_REVOKED(c) false
#else
#define IS_REVOKED(c) revoked[c]
#endif

#ifdef MUT_NOT_NOTED_BEFORE
#define FIRST_NOTE(c) skip
#else
#define FIRST_NOTE(c) note[c] = UNDECIDED; note_gen[c] = gen; note_attempts[c] = attempts
#endif

#ifdef MUT_UNPINNED_BEFORE_DECIDED
#define AND_UNPIN pin = false
#else
#define AND_UNPIN skip
#endif

proctype Listener() {
  byte at = RESTING, c;
end:
  do
  :: d_step { life == UP && at == RESTING && up[con] && claim_gen == 0 && published && !done && holder == 0 && !pin &&
              attempts < 3 && !calm ->
       c = con; pin = true; holder = 1; attempts++; claim_gen = gen; claim_attempts = attempts; at = HOLDING;
       printf("X claims generation %d, attempt %d\n", gen, attempts) }
#ifdef MUT_LOOKS_BEFORE_IT_NOTES
  :: d_step { life == UP && at == HOLDING && sent[c] && !revoked[c] -> sent[c] = false; at = NOTED }
  :: d_step { life == UP && at == NOTED -> FIRST_NOTE(c); at = CHECKED }
#else
  :: d_step { life == UP && at == HOLDING && sent[c] -> sent[c] = false; FIRST_NOTE(c); at = NOTED }
  :: d_step { life == UP && at == NOTED -> if :: IS_REVOKED(c) -> at = REVOKED :: else -> at = CHECKED fi }
#endif
  :: d_step { life == UP && at == CHECKED ->
       assert(told[CLAIM(gen, attempts)] != REFUSED || V1_told_no_and_consumed);
       done = true; by[gen] = attempts; AND_UNPIN; at = CONSUMED; printf("X consumes generation %d\n", gen) }
  :: d_step { life == UP && at == CONSUMED ->
       note[c] = ACCEPTED; note_gen[c] = gen; note_attempts[c] = attempts; at = DECIDED }
  :: d_step { life == UP && at == DECIDED -> pin = false; answer[c] = ACCEPTED; at = RESTING }
  :: d_step { life == UP && at == REVOKED -> note[c] = REFUSED; holder = 0; pin = false; answer[c] = REFUSED; at = RESTING }
  :: d_step { life == UP && at == HOLDING && !up[c] -> holder = 0; pin = false; sent[c] = false; at = RESTING;
       printf("X gives back\n") }
  :: d_step { life == UP && !calm -> life = DEAD; at = RESTING; up[c] = false; up[con] = false; sent[c] = false;
       printf("X is killed\n") }
  od
}

/* ------------------------------------------------------------------ death: whoever has its lock, X's successor, too */
#define CONSUMED_BY_IT(k) (pin && done && gen == note_gen[k] && holder == 1 && attempts == note_attempts[k])
inline decide(k) {
  if
  :: note[k] == UNDECIDED && CONSUMED_BY_IT(k) -> note[k] = ACCEPTED
  :: note[k] == UNDECIDED && !CONSUMED_BY_IT(k) -> note[k] = REFUSED
  :: else -> skip
  fi
}
inline decide_all() {
  decide(0);
#if CONNECTIONS > 1
  decide(1);
#endif
#if CONNECTIONS > 2
  decide(2);
#endif
  skip
}
inline clear() {
  if :: pin && holder == 1 && !done -> holder = 0 :: else fi;
  pin = false
}

proctype Reclaimer() {
  byte step;
end:
  do
#ifdef MUT_CLEARED_BEFORE_DECIDED
  :: d_step { life == DEAD && step == 0 -> clear(); step = 1 }
  :: d_step { life == DEAD && step == 1 -> decide_all(); step = 2 }
#else
  :: d_step { life == DEAD && step == 0 -> decide_all(); step = 1 }
  :: d_step { life == DEAD && step == 1 -> clear(); step = 2 }
#endif
  :: d_step { life == DEAD && step == 2 -> life = UP; step = 0; printf("X is reclaimed and up again\n") }
  :: d_step { life == DEAD && step > 0 && !calm -> step = 0; printf("the reclaimer is killed\n") }
  od
}

/* ------------------------------------------------------------------ the client */
#define IDLE   0
#define ASKED  1
#define BROKEN 2
#define ASKING 3

proctype Client() {
  byte at = IDLE;
end:
  do
  :: d_step { at == IDLE && claim_gen != 0 && up[con] -> sent[con] = true; at = ASKED }
  :: d_step { at == IDLE && claim_gen != 0 && !up[con] -> tell(REFUSED); at = BROKEN; claim_gen = 0 }  /* never asked */
  :: d_step { at == IDLE && claim_gen == 0 && !up[con] && con + 1 < CONNECTIONS -> at = BROKEN }
  :: d_step { at == ASKED && answer[con] != NONE && up[con] -> tell(answer[con]); answer[con] = NONE; claim_gen = 0; at = IDLE }
#ifdef MUT_LOST_ANSWER_IS_NO
  :: d_step { at == ASKED && !up[con] -> tell(REFUSED); claim_gen = 0; at = BROKEN }
#else
  :: d_step { at == ASKED && !up[con] -> revoked[con] = true; at = ASKING }
#endif
  :: d_step { at == ASKING && !(note[con] == UNDECIDED && note_gen[con] == claim_gen) ->
       if
       :: note[con] == ACCEPTED && note_gen[con] == claim_gen && note_attempts[con] == claim_attempts -> tell(ACCEPTED)
       :: else -> tell(REFUSED)
       fi;
       claim_gen = 0; at = BROKEN }
  :: d_step { at == BROKEN && con + 1 < CONNECTIONS -> con++; up[con] = true; at = IDLE }
  :: d_step { up[con] && !calm -> up[con] = false; printf("connection %d breaks\n", con) }
  od
}

init {
  atomic { up[0] = true; run Writer(); run Other(); run Listener(); run Reclaimer(); run Client() }
  d_step { calm = true; printf("nothing fails from here on\n") }
  timeout;
  assert(claim_gen == 0 || V3_stuck);
  assert(!pin || V3_stuck)
}
