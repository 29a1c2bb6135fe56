/* The ring as the queue: claims, which are a pin and an entry of the slot's claim words, one atomic step each.
 *
 * One slot. Owners have two hands each: two threads, or two connections of a listener, that share one pin bit and
 * exclude each other by the slot's stripe. A kill falls between any two steps and takes both hands and the stripe.
 * Steps: claim = pin, then the entry from nobody to me with one more attempt; finish = the entry looked at, then the
 * rank's done bit and the pin in one swap (the entry stays: a done rank is never claimed, and the next publish clears
 * it); give back = the entry to nobody, then the pin. Whoever clears a dead owner's bit clears its entries first.
 * With LAPSE anybody may end a claim that was held for too long, whatever its holder does: the entry becomes nobody's and
 * the pin stays, until its holder finds out. Such a holder may have looked at its entry already when it consumes; the
 * done bit decides then, and T2 and T6, which are about the entry, are not asked.
 * A late finish is one whose hand has given its claim back (the connection was thought lost) and asks all the same.
 *
 * Defines: RANKS MAXGEN HANDS are sizes; DISCARD allows it; OVERWRITE allows it; MUT_* plants a fault, with MUTANT. */

#ifndef RANKS
#define RANKS 1
#endif
#ifndef MAXGEN
#define MAXGEN 2
#endif
#ifndef HANDS
#define HANDS 2
#endif
#ifndef OWNERS
#define OWNERS 2
#endif
#define ALL ((1 << RANKS) - 1)
#define BIT(x) (1 << (x))
#define MAXATTEMPTS 3           /* claims counted; more are made, and not told apart from the third */

#define FREE    0
#define WRITING 1
#define READY   2
#define READING 3

/* the word */
byte gen, st, done, pins;
/* the claim words: owner + 1, and how often the rank was claimed */
byte holder[RANKS], attempts[RANKS];
/* ghosts */
byte written;                   /* the generation whose bytes are in memory */
byte consumed;                  /* ranks whose consume was accepted, of this generation */
bool published, discarded;
byte live[RANKS];               /* hands of live owners that hold a claim of this rank and believe in it */

#define UNLOCKED 0
#define OWNED    1
#define HELD     2
byte lock[OWNERS];
bool calm = false;

bool T1_consumed_twice;
bool T2_claimed_by_two;
bool T3_payload_lost;
bool T4_stuck;
bool T5_rewritten_under_a_claim;
bool T6_trained_on_anothers_claim;

#define PUBLISHED (st == READY || st == READING)

inline settle() {
  if
#ifdef MUT_FREED_BESIDE_A_PIN
  :: pins != 0 && done != ALL -> st = READING
  :: done == ALL -> st = FREE; pins = 0
#else
  :: pins != 0 -> st = READING
  :: pins == 0 && done == ALL -> st = FREE
#endif
  :: else -> st = READY
  fi
}

inline account() {
  assert(!published || discarded || consumed == ALL || T3_payload_lost)
}

/* ------------------------------------------------------------------ the writer, which slot.pml kills */
inline begin() {
  account();
  gen++; st = WRITING; done = 0; consumed = 0; published = false; discarded = false
}

proctype Writer() {
end:
  do
  :: d_step { !calm && st == FREE && gen < MAXGEN -> begin(); printf("take, generation %d\n", gen) }
#ifdef OVERWRITE
  :: d_step { !calm && st == READY && done == 0 && gen < MAXGEN -> discarded = true; begin();
       printf("overwrite, generation %d\n", gen) }
#endif
  :: d_step { st == WRITING && written != gen -> written = gen }
  :: d_step { st == WRITING && written == gen ->
#ifndef MUT_PUBLISH_KEEPS_CLAIMS
       holder[0] = 0; attempts[0] = 0;
#if RANKS > 1
       holder[1] = 0; attempts[1] = 0;
#endif
#endif
       st = READY; published = true; printf("publish\n") }
#ifdef DISCARD
  :: d_step { !calm && PUBLISHED && done != ALL -> done = ALL; discarded = true; settle(); printf("discard\n") }
#endif
  /* an acknowledgement by ticket, from a reader that claims nothing */
  :: d_step { !calm && PUBLISHED && done != ALL && !(done & 1) ->
       assert(!(consumed & 1) || T1_consumed_twice);
       consumed = consumed | 1; done = done | 1; settle(); printf("consume by ticket\n") }
  od
}

/* ------------------------------------------------------------------ owners that claim */
#define DEAD     0
#define CLEARING 1
#define UP       2

#define NONE    0
#define PINNED  1               /* pinned, the entry not yet looked at */
#define LOSER   2               /* somebody else has the entry */
#define HOLDING 3
#define LEAVING 4               /* the entry is nobody's again, the pin still there */
#define LATE    5               /* has given back, and may still ask to finish */
typedef Hand { byte at; byte ticket; byte rank; byte number }

#ifdef LAPSE
#define ALONE(i) true
#define AND_OURS(i) true
#else
#define ALONE(i) (live[h[i].rank] == 1 || (done & BIT(h[i].rank)))
#define AND_OURS(i) (holder[h[i].rank] == o + 1 && attempts[h[i].rank] == h[i].number)
#endif
#define CHECKED 6               /* has looked at its entry, and is about to consume */

#define OURS(i) (holder[h[i].rank] == o + 1 && FENCED(i))
#ifdef MUT_FINISH_NOT_FENCED
#define FENCED(i) true
#else
#define FENCED(i) (attempts[h[i].rank] == h[i].number)
#endif

inline unpin(i) {
  mine--;
  if
  :: mine == 0 -> pins = pins & ~BIT(o); settle()
  :: else -> skip
  fi
}
inline forget(i) { h[i].at = NONE; h[i].ticket = 0; h[i].rank = 0; h[i].number = 0 }

#ifdef MUT_CLAIM_BY_STORE               /* looked at before the pin, stored after it */
#define FREE_ENTRY(r) true
#else
#define FREE_ENTRY(r) (holder[r] == 0)
#endif

inline count_attempt(i) {
  if
  :: attempts[h[i].rank] < MAXATTEMPTS -> attempts[h[i].rank]++
  :: else -> skip
  fi;
  h[i].number = attempts[h[i].rank]
}

#ifdef MUT_CLAIM_BEFORE_PIN
#define EARLY_ENTRY(i, r) holder[r] = o + 1
#define PIN_IT(i)
#define LATE_PIN(i) mine++; pins = pins | BIT(o); st = READING
#else
#define EARLY_ENTRY(i, r)
#define PIN_IT(i) mine++; pins = pins | BIT(o); st = READING
#define LATE_PIN(i)
#endif

#ifdef LAPSE                    /* one whose claim lapsed has to find out before it claims this rank again */
#if HANDS > 1
#define RESOLVED(r) (!(h[0].at == HOLDING && h[0].rank == r) && !(h[1].at == HOLDING && h[1].rank == r))
#else
#define RESOLVED(r) true
#endif
#else
#define RESOLVED(r) true
#endif
#define CLAIM(i, r) \
  :: d_step { life == UP && !stripe && RESOLVED(r) && h[i].at == NONE && PUBLISHED && !(done & BIT(r)) && holder[r] == 0 && \
              attempts[r] < MAXATTEMPTS -> \
       stripe = true; EARLY_ENTRY(i, r); PIN_IT(i); \
       h[i].at = PINNED; h[i].ticket = gen; h[i].rank = r; printf("owner %d: pin for rank %d\n", o, r) }

#ifdef MUT_CLAIM_BEFORE_PIN
#define GET_ENTRY(i) \
  :: d_step { h[i].at == PINNED && PUBLISHED && gen == h[i].ticket -> LATE_PIN(i); count_attempt(i); \
       h[i].at = HOLDING; live[h[i].rank]++; stripe = false } \
  :: d_step { h[i].at == PINNED && !(PUBLISHED && gen == h[i].ticket) -> holder[h[i].rank] = 0; forget(i); stripe = false }
#else
#define GET_ENTRY(i) \
  :: d_step { h[i].at == PINNED && FREE_ENTRY(h[i].rank) -> \
       holder[h[i].rank] = o + 1; count_attempt(i); h[i].at = HOLDING; live[h[i].rank]++; stripe = false; \
       assert(ALONE(i) || T2_claimed_by_two); \
       printf("owner %d: claim rank %d, attempt %d\n", o, h[i].rank, h[i].number) } \
  :: d_step { h[i].at == PINNED && !FREE_ENTRY(h[i].rank) -> h[i].at = LOSER }
#endif

#ifdef MUT_FINISH_IGNORES_DONE
#define NOT_DONE(i) true
#else
#define NOT_DONE(i) (!(done & BIT(h[i].rank)))
#endif

inline accept(i) {              /* the done bit and the pin in one swap */
  assert(!(consumed & BIT(h[i].rank)) || T1_consumed_twice);
  assert(AND_OURS(i) || T6_trained_on_anothers_claim);
  consumed = consumed | BIT(h[i].rank); done = done | BIT(h[i].rank);
  mine--;
  if
  :: mine == 0 -> pins = pins & ~BIT(o)
  :: else -> skip
  fi;
  settle();
  printf("owner %d: finish rank %d\n", o, h[i].rank)
}

#ifdef MUT_ENTRY_DROPPED_AFTER_THE_PIN
#define DROP(i) unpin(i)
#define AND_THEN(i) if :: OURS(i) && gen == h[i].ticket -> holder[h[i].rank] = 0 :: else fi
#else
#define DROP(i) if :: OURS(i) && NOT_DONE(i) -> holder[h[i].rank] = 0 :: else fi
#define AND_THEN(i) unpin(i)
#endif

#ifdef MUT_REFUSED_FINISH_KEEPS_PIN
#define CONSUME_LATER(i)
#define REFUSED(i) false
#else
#ifdef LAPSE
#ifdef MUT_LAPSED_FINISH_KEEPS_PIN
#define REFUSED(i) (!NOT_DONE(i))
#else
#define REFUSED(i) (!NOT_DONE(i) || !OURS(i))
#endif
#define CONSUME_LATER(i) \
  :: d_step { h[i].at == HOLDING && !stripe && OURS(i) -> stripe = true; h[i].at = CHECKED } \
  :: d_step { h[i].at == CHECKED && NOT_DONE(i) -> \
       assert(written == h[i].ticket || T5_rewritten_under_a_claim); \
       accept(i); live[h[i].rank]--; forget(i); stripe = false } \
  :: d_step { h[i].at == CHECKED && !NOT_DONE(i) -> live[h[i].rank]--; h[i].at = LEAVING }
#else
#define REFUSED(i) (!NOT_DONE(i))
#define CONSUME_LATER(i)
#endif
#endif

/* Bytes are looked at for as long as the hand holds. */
#define HAND(i) \
  CLAIM(i, 0) \
  SECOND(i) \
  GET_ENTRY(i) \
  CONSUME_LATER(i) \
  :: d_step { h[i].at == LOSER -> unpin(i); forget(i); stripe = false } \
  :: d_step { h[i].at == HOLDING && !stripe && ((OURS(i) && NOT_DONE(i)) || REFUSED(i)) -> \
       assert(written == h[i].ticket || T5_rewritten_under_a_claim); \
       if :: OURS(i) && NOT_DONE(i) -> accept(i); live[h[i].rank]--; forget(i) \
       :: else -> stripe = true; DROP(i); live[h[i].rank]--; h[i].at = LEAVING \
       fi } \
  :: d_step { h[i].at == HOLDING && !stripe && !calm -> \
       stripe = true; DROP(i); live[h[i].rank]--; h[i].at = LEAVING; printf("owner %d: give back\n", o) } \
  :: d_step { h[i].at == LEAVING -> AND_THEN(i); stripe = false; \
       if :: calm -> forget(i) :: else -> h[i].at = LATE fi } \
  :: d_step { h[i].at == LATE && !stripe && gen == h[i].ticket && st == READING && mine > 0 && OURS(i) && NOT_DONE(i) -> \
       accept(i); forget(i) } \
  :: d_step { h[i].at == LATE -> forget(i) }

#if RANKS > 1
#define SECOND(i) CLAIM(i, 1)
#else
#define SECOND(i)
#endif

inline vanish(i) {
  if
  :: h[i].at == HOLDING || h[i].at == CHECKED -> live[h[i].rank]--
  :: else -> skip
  fi;
  forget(i)
}

/* Entries first, then the bit: whoever dies between leaves the bit, by which the next one finds it. */
#ifdef MUT_RECLAIM_FORGETS_CLAIMS
#define ENTRIES_OF(x) false
#else
#if RANKS > 1
#define ENTRIES_OF(x) ((holder[0] == (x) + 1 && !(done & 1)) || (holder[1] == (x) + 1 && !(done & 2)))
#else
#define ENTRIES_OF(x) (holder[0] == (x) + 1 && !(done & 1))
#endif
#endif
inline clear_entries(x) {
  if
  :: holder[0] == x + 1 && !(done & 1) -> holder[0] = 0
  :: else -> skip
  fi;
#if RANKS > 1
  if
  :: holder[1] == x + 1 && !(done & 2) -> holder[1] = 0
  :: else -> skip
  fi
#endif
}
inline clear_bit(x) { pins = pins & ~BIT(x); settle(); printf("reclaim owner %d\n", x) }
#ifdef MUT_RECLAIM_CLEARS_THE_BIT_FIRST
#define CLEAR(may, x) \
  :: d_step { may && (pins & BIT(x)) -> clear_bit(x); cleared = true } \
  :: d_step { may && cleared -> clear_entries(x); cleared = false }
#else
#define CLEAR(may, x) \
  :: d_step { may && (pins & BIT(x)) && ENTRIES_OF(x) -> clear_entries(x) } \
  :: d_step { may && (pins & BIT(x)) && !ENTRIES_OF(x) -> clear_bit(x) }
#endif

proctype Owner(byte o) {
  byte life = UP, mine;         /* mine: pins of this owner's hands */
  bool stripe, cleared;
  Hand h[HANDS];
end:
  do
  HAND(0)
#if HANDS > 1
  HAND(1)
#endif
  :: d_step { life != DEAD && !calm ->
       life = DEAD; lock[o] = UNLOCKED; mine = 0; stripe = false; cleared = false;
       vanish(0);
#if HANDS > 1
       vanish(1);
#endif
       printf("owner %d: killed\n", o) }
  :: d_step { life == DEAD && lock[o] == UNLOCKED -> lock[o] = OWNED; life = CLEARING }
  CLEAR(life == CLEARING, o)
  :: d_step { life == CLEARING && !(pins & BIT(o)) && !cleared -> life = UP; printf("owner %d: up again\n", o) }
  od
}

#define LAPSE_OPTION(r) \
  :: d_step { !calm && PUBLISHED && !(done & BIT(r)) && holder[r] != 0 -> holder[r] = 0; printf("rank %d lapses\n", r) }

proctype Janitor() {
  byte x = 255;
  bool cleared;
end:
  do
#ifdef LAPSE
  LAPSE_OPTION(0)
#if RANKS > 1
  LAPSE_OPTION(1)
#endif
#endif
  :: d_step { x == 255 && lock[0] == UNLOCKED && (pins & 1) -> lock[0] = HELD; x = 0 }
  :: d_step { x == 255 && lock[1] == UNLOCKED && (pins & 2) -> lock[1] = HELD; x = 1 }
  CLEAR(x != 255, x)
  :: d_step { x != 255 && (!calm || (!(pins & BIT(x)) && !cleared)) -> lock[x] = UNLOCKED; x = 255; cleared = false }
  od
}

init {
  atomic {
    lock[0] = OWNED; lock[1] = OWNED;
    run Writer(); run Owner(0); run Owner(1); run Janitor()
  }
  d_step { calm = true; printf("nothing fails from here on\n") }
  timeout;
  /* A rank that was claimed as often as is counted here is not claimed again; it may rest. */
  assert(st == FREE || attempts[0] == MAXATTEMPTS ||
#if RANKS > 1
         attempts[1] == MAXATTEMPTS ||
#endif
         T4_stuck);
  assert(pins == 0 || T4_stuck)
}
