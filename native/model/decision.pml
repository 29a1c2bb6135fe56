/* A record that becomes final in a store (transport/store/decision.py): read, then compare-and-set with the version read.
 *
 * With OPEN=0 it is a decision, final from its first value; otherwise a state that is led through OPEN values to its final
 * one, as a run's round and an epoch's record are. Deciders propose different final values. Each is killed between any two
 * steps and starts anew, or is stopped there; the answer to a write is lost, whether or not the write took place. What a
 * decider has acted on, even one that was killed afterwards, is kept as a ghost.
 *
 * Defines: DECIDERS is 2 or 3; OPEN, the number of values before the final one; MUT_* plants a fault. */

#ifndef DECIDERS
#define DECIDERS 2
#endif
#ifndef OPEN
#define OPEN 0
#endif
#define NOTHING 0
#define FINAL   2               /* final values are above it; 1 and 2 are open ones, in turn, so that a value comes back */

bool W1_two_decisions;
bool W2_not_proposed;
bool W3_stuck;
bool W4_made_of_an_older_value;
bool W5_written_after_its_end;

byte record = NOTHING;          /* in the store */
byte version = 0;               /* of the record; grows with each write */
byte acted = NOTHING;           /* ghost: the decision that somebody has acted on */
bool calm = false;
byte ended;

inline act(value) {
  assert(acted == NOTHING || acted == value || W1_two_decisions);
  assert((value > FINAL && value <= FINAL + DECIDERS) || W2_not_proposed);
  acted = value; printf("%d acts on %d\n", me, value)
}

inline write() {
  assert(record <= FINAL || W5_written_after_its_end);
  assert(seen == version || W4_made_of_an_older_value);
  record = (version == OPEN -> FINAL + me : 1 + version % 2);
  version++; printf("%d writes %d\n", me, record)
}

#define READS   0
#define WRITES  1
#define ENDED   2

#ifdef MUT_COMPARES_VALUES       /* in place of versions */
#define UNCHANGED (record == found)
#else
#define UNCHANGED (version == seen)
#endif

#ifdef MUT_LOST_ANSWER_IS_NO     /* who lost the answer believes that another has decided, and decides something else */
#define AFTER_LOSS act(FINAL + 1 + me % DECIDERS); at = ENDED; ended++
#elif defined(MUT_LOST_ANSWER_IS_YES)
#define AFTER_LOSS act(FINAL + me); at = ENDED; ended++
#else
#define AFTER_LOSS at = READS
#endif

proctype Decider(byte me) {
  byte at = READS;
  byte seen, found;             /* version and value that were read */
end:
  do
  :: d_step { at == READS && record > FINAL -> act(record); at = ENDED; ended++ }
  :: d_step { at == READS && record <= FINAL -> seen = version; found = record; at = WRITES }
#ifdef MUT_WRITES_WITHOUT_COMPARING
  :: d_step { at == WRITES -> write(); at = READS }
#else
  :: d_step { at == WRITES && UNCHANGED -> write(); at = READS }
#ifndef MUT_REFUSED_IS_THE_END
  :: d_step { at == WRITES && !UNCHANGED -> at = READS }
#endif
#endif
  :: d_step { at == WRITES && !calm ->   /* the answer is lost */
       if :: UNCHANGED -> write() :: else fi; AFTER_LOSS }
  :: d_step { at == WRITES && !calm -> AFTER_LOSS }
  :: d_step { at == ENDED && !calm -> at = READS; ended-- }  /* asks again, also after it was killed */
  :: d_step { at == WRITES && !calm -> at = READS }          /* is killed, and starts anew */
  od
}

init {
  atomic {
    run Decider(1); run Decider(2);
#if DECIDERS > 2
    run Decider(3);
#endif
    skip
  }
  d_step { calm = true; printf("nothing fails from here on\n") }
  timeout;
  assert((ended == DECIDERS && record > FINAL && record == acted) || W3_stuck)
}
